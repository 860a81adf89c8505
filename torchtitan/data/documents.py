"""Samples of text: the tokens of all documents in a row, cut into sequences.

The documents are in order, each followed by an end token. Sample i is the tokens i*S to i*S + S,
the last one only a label, so that each token is predicted once per epoch. One document per sample
would fill batches with padding.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone
from torchtitan.base.log import plural
from torchtitan.data.corpus import Corpus, file_corpus, stdlib_corpus
from torchtitan.data.dataset import IGNORED, ORDER, Dataset, has_document_lengths
from torchtitan.data.files import divide, find_all
from torchtitan.data.holdout import ALL, Holdout, held_out_prefix
from torchtitan.data.loader import Samples
from torchtitan.data.prepare import cached_store
from torchtitan.data.sampler import Mixture
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.store import TokenStore
from torchtitan.data.synthetic import MaskedDataset, synthetic_corpus
from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


class TextSource:
    """The samples of one or more rows of tokens, in order.

    With `attn_mask_type = "block_causal"` no label crosses a document's end.

    An id of `vocab_size` or more, made by another tokenizer, is a DataError.
    """

    def __init__(
        self,
        stores: Sequence[TokenStore],
        training: TrainingConfig,
        *,
        vocab_size: int,
    ) -> None:
        self.stores: Sequence[TokenStore] = list(stores)
        self._seq_len, self._vocab_size = training.seq_len, vocab_size
        self._splits_labels = training.attn_mask_type == "block_causal"
        self._has_lengths = has_document_lengths(training)
        self.ends = list(accumulate((max(0, s.num_tokens - 1)) // self._seq_len for s in stores))
        """Number of samples up to the end of each row."""
        self.num_samples = self.ends[-1]

    def __getitem__(self, i: int) -> Samples:
        number, first = self.place_of(i)
        store, stop = self.stores[number], first + self._seq_len + 1
        tokens = store.tokens[first:stop]
        if tokens.max() >= self._vocab_size or tokens.min() < 0:
            raise DataError(
                f"the token store {store.prefix} has ids {tokens.min()} to {tokens.max()}, the "
                f"tokenizer has 0 to {self._vocab_size - 1}"
            )
        # a copy as int64: the model takes no other type, and the map is read-only
        row = torch.from_numpy(tokens.astype(np.int64))
        sample = {"tokens": row[:-1], "labels": row[1:]}
        if self._has_lengths:
            begins = np.array(store.boundaries(first, stop), np.int64) - first
            if self._splits_labels:
                sample["labels"] = sample["labels"].clone()
                sample["labels"][torch.from_numpy(begins) - 1] = IGNORED
            inside = begins[begins < self._seq_len]
            lengths = np.diff(inside, prepend=0, append=self._seq_len)
            sample["document_lengths"] = torch.from_numpy(lengths)
        return sample

    def place_of(self, i: int) -> tuple[int, int]:
        """Return the row that holds sample i, and the first token of the sample in it."""
        number = bisect(self.ends, i)
        return number, (i - (self.ends[number - 1] if number else 0)) * self._seq_len

    def content_hash(self) -> str:
        """Return a SHA-256 of the contents of all stores."""
        hashes = "".join(store.content_hash() for store in self.stores)
        return hashlib.sha256(hashes.encode()).hexdigest()


def build_text(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    seed: int,
    holdout: Holdout = ALL,
    once: Once = alone,
) -> Dataset:
    """Build the samples of text that `[training]` describes, tokenized first if necessary.

    `once` finds files in one process of this machine. Raises DataError if data are missing, empty,
    damaged or too short.
    """
    stores = [
        [
            _side_of(part, holdout)
            if isinstance(part, TokenStore)
            else cached_store(
                part,
                tokenizer=tokenizer,
                cache=training.dataset_cache,
                holdout=holdout,
                once=once,
            )
            for part in parts
        ]
        for parts in find_corpora(training, holdout=holdout, once=once)
    ]
    weights = training.dataset_weights or (1.0,)
    if holdout.fraction is not None and holdout.held_out:
        # each document once, without weights
        stores, weights = [[store for row in stores for store in row]], (1.0,)
    sources = [TextSource(row, training, vocab_size=tokenizer.vocab_size) for row in stores]
    for source in sources:
        if not source.num_samples:
            most = max(store.num_tokens for store in source.stores)
            rule = f"the stores of a source have at most {most} tokens, less than seq_len + 1"
            if holdout.fraction is not None:
                raise holdout.too_small(rule)
            names = ", ".join(training.dataset_path) or training.dataset
            raise DataError.at("seq_len", f"{rule} = {training.seq_len + 1}: {names:.200}")
    masked = training.dataset == "synthetic_masked"
    dataset = (MaskedDataset if masked else Dataset)(
        sources,
        weights=weights,
        seed=seed,
        num_epochs=training.num_epochs,
        # without attn_mask_type and reset_positions: a position stays valid under others
        fingerprint={
            "data": ",".join(source.content_hash() for source in sources),
            "tokenizer": tokenizer.fingerprint,
            "seq_len": str(training.seq_len),
            "seed": str(seed),
            "weights": ":".join(map(str, Mixture(weights).weights)),
            "masked labels": str(masked),
            "order": ORDER,
            **holdout.fingerprint(),
        },
    )
    # ids of another tokenizer are usually found in the first sample, before any long work
    dataset[0]
    num_sources, num_tokens = plural(len(stores), "source"), plural(dataset.num_tokens, "token")
    logger.info("data: %s, %s, samples of %d", num_sources, num_tokens, training.seq_len)
    return dataset


def _side_of(store: TokenStore, holdout: Holdout) -> TokenStore:
    """Return one side of a store of the user, which `torchtitan prepare` has divided."""
    if holdout.fraction is None:
        return store
    twin = held_out_prefix(store.prefix, holdout.fraction)
    if not Path(f"{twin}.idx").exists():
        rule = (
            f"the token store {store.prefix} has no store of held-out documents, {twin}.idx; write "
            f"both by torchtitan prepare --holdout_fraction {holdout.fraction}, or name other data "
            f"in validation.dataset_path"
        )
        raise DataError.at("holdout_fraction", rule)
    return TokenStore(twin) if holdout.held_out else store


def find_corpora(
    training: TrainingConfig, *, holdout: Holdout = ALL, once: Once = alone
) -> list[list[Corpus | TokenStore]]:
    """Return the parts of each source. With weights, each entry of `dataset_path` is a source."""
    if training.dataset == "python_stdlib":
        return [[stdlib_corpus()]]
    if training.dataset != "files":
        return [[synthetic_corpus(held_out=holdout.takes_other_text)]]
    groups = find_all(training.dataset_path, cache=training.dataset_cache, once=once)
    if not training.dataset_weights:
        groups = [[file for files in groups for file in files]]
    counts = Counter(file for files in groups for file in files)
    if repeated := [file for file, count in counts.items() if count > 1]:
        warning = "dataset_path names %s more than once, as %s: their documents are repeated"
        logger.warning(warning, plural(len(repeated), "file"), repeated[0])
    sources: list[list[Corpus | TokenStore]] = []
    for texts, stores in map(divide, groups):
        text = file_corpus(texts, training.dataset_text_key, training.dataset_text_template)
        sources.append([*([text] if texts else []), *map(TokenStore, stores)])
    return sources
