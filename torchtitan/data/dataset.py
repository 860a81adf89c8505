"""Samples of the training, numbered in the order in which they are trained on.

`dataset[k]` is the k-th sample of the whole run, on any rank of any layout: `sampler.py` tells
which one that is. A store is one long row of tokens, documents end to end, each closed by an end
token; sample i of a store is tokens i*S to i*S + S, the last of them only a label, so that each
token is predicted once an epoch. One document a sample would fill batches with padding instead.

A data set is small and can be sent to worker processes: it holds file names and numbers.
"""

from __future__ import annotations

import hashlib
import logging
import random
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.data.builtin import StdlibCorpus, SyntheticCorpus
from torchtitan.data.files import STORE, find_files
from torchtitan.data.prepare import cached_store
from torchtitan.data.sample_log import hash_tokens
from torchtitan.data.sampler import Mixture, Permutation
from torchtitan.data.source import Corpus, FileCorpus
from torchtitan.data.split import Side, View, build_view
from torchtitan.data.store import TokenStore

if TYPE_CHECKING:
    from torchtitan.data.settings import TrainingConfig
    from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# part of the fingerprint: a change of the algorithms of order is a change of data
ORDER = "1"
IGNORED = -100


class Source:
    """The samples of one or more stores, one store after another."""

    def __init__(self, stores: Sequence[TokenStore | View], *, seq_len: int) -> None:
        self.stores, self._seq_len = list(stores), seq_len
        self._ends = list(accumulate((s.num_tokens - 1) // seq_len for s in stores))
        self.num_samples = self._ends[-1]
        self.num_tokens = sum(store.num_tokens for store in stores)

    def __getitem__(self, i: int) -> npt.NDArray[Any]:
        """Return the seq_len + 1 tokens of sample i, as they are stored."""
        store, first = self._find(i)
        return store.read(first, first + self._seq_len + 1)

    def boundaries(self, i: int) -> npt.NDArray[np.int64]:
        """Return the places 1 to seq_len, of the tokens of sample i, at which a document begins."""
        store, first = self._find(i)
        return np.array(store.boundaries(first, first + self._seq_len + 1), np.int64) - first

    def _find(self, i: int) -> tuple[TokenStore | View, int]:
        """Return the store of sample i, and its first token there."""
        number = bisect(self._ends, i)
        return self.stores[number], (i - (self._ends[number - 1] if number else 0)) * self._seq_len

    def content_hash(self) -> str:
        """Return a SHA-256 of the contents of all stores."""
        hashes = "".join(store.content_hash() for store in self.stores)
        return hashlib.sha256(hashes.encode()).hexdigest()


class Dataset:
    """All samples of a run in training order; `dataset[k]` is `{"tokens", "labels"}`, int64 [S].

    Where somebody wants to know documents apart there are `document_lengths` too, int64: the tokens
    of each, one after another, cut where the sample begins and ends.

    Args:
        sources: what samples are drawn from, in proportion to `weights`.
        seed: with the data it decides the order.
        tokenizer: whose ids the stores hold; any other id found is a DataError.
        num_epochs: the data ends when a source was seen this often; None never ends.
        masks_labels: label only a pseudo-random run of each sample, the others are -100.
        document_attention: within: no label crosses a document's end either.
        document_positions: restart: the lengths are needed for them.
        side: which documents of their stores the sources read; None reads all.

    What documents are to the model is not in the fingerprint, by which positions in the order of
    samples are compared: it changes no sample's tokens. That it shapes the training is the
    trajectory's concern, so that a run may be continued under other ones where it says so.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float],
        seq_len: int,
        seed: int,
        tokenizer: Tokenizer,
        num_epochs: int | None = None,
        masks_labels: bool = False,
        document_attention: Literal["across", "within"] = "across",
        document_positions: Literal["continue", "restart"] = "continue",
        side: Side | None = None,
    ) -> None:
        self._sources, self._mixture = list(sources), Mixture(weights)
        self._seq_len, self._seed, self._masks_labels = seq_len, seed, masks_labels
        self._vocab_size = tokenizer.vocab_size
        self._splits_labels = document_attention == "within"
        self._tells_documents = self._splits_labels or document_positions == "restart"
        self.num_samples: int | None = None
        if num_epochs is not None:
            self.num_samples = min(
                self._mixture.exhausted_after(i, num_samples=num_epochs * source.num_samples)
                for i, source in enumerate(sources)
            )
        self.fingerprint = {
            "data": ",".join(source.content_hash() for source in sources),
            "tokenizer": tokenizer.fingerprint,
            "seq_len": str(seq_len),
            "seed": str(seed),
            "weights": ":".join(map(str, self._mixture.weights)),
            "masked labels": str(masks_labels),
            "order": ORDER,
            **(side.fingerprint() if side else {}),
        }

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        # int64 of our own: the model wants it, and the map is read-only
        source, i = self._find(k)
        row = torch.from_numpy(self._checked(source[i]).astype(np.int64))
        tokens, labels = row[:-1], row[1:]
        if self._masks_labels:
            labels = labels.clone()
            first, last = labelled_run(k, seq_len=self._seq_len, seed=self._seed)
            labels[:first] = IGNORED
            labels[last:] = IGNORED
        if not self._tells_documents:
            return {"tokens": tokens, "labels": labels}
        begins = source.boundaries(i)
        if self._splits_labels:
            labels = labels.clone()
            labels[torch.from_numpy(begins) - 1] = IGNORED
        inside = begins[begins < self._seq_len]
        lengths = torch.from_numpy(np.diff(inside, prepend=0, append=self._seq_len))
        return {"tokens": tokens, "labels": labels, "document_lengths": lengths}

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sources."""
        return sum(source.num_tokens for source in self._sources)

    @property
    def stores(self) -> list[TokenStore]:
        """Return the stores that are read whole."""
        stores = [store for source in self._sources for store in source.stores]
        return [store for store in stores if isinstance(store, TokenStore)]

    def sample_hash(self, k: int) -> str:
        """Return 16 hexadecimal digits that tell sample k's tokens from others."""
        return hash_tokens(self[k]["tokens"])

    def _find(self, k: int) -> tuple[Source, int]:
        """Return the source of sample k, and its number there."""
        draw = self._mixture[k]
        source = self._sources[draw.source]
        epoch, index = divmod(draw.index, source.num_samples)
        order = Permutation(source.num_samples, seed=self._seed, epoch=epoch, source=draw.source)
        return source, order[index]

    def _checked(self, row: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if row.max() >= self._vocab_size or row.min() < 0:
            raise DataError(
                f"the data must hold ids of the tokenizer, 0 to {self._vocab_size - 1}, found "
                f"{row.min()} to {row.max()}; it was tokenised with another one than "
                f"model.tokenizer_path"
            )
        return row


def labelled_run(k: int, *, seq_len: int, seed: int) -> tuple[int, int]:
    """Return begin and end of the labels that sample k keeps: none, all, or a run in between."""
    draw = random.Random(f"labels/{seed}/{k}").random
    kind = draw()
    if kind < 1 / 8:
        return 0, 0
    if kind < 1 / 4:
        return 0, seq_len
    length = int(draw() * (seq_len + 1))
    first = int(draw() * (seq_len - length + 1))
    return first, first + length


def build_dataset(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    seed: int,
    held_out: bool = False,
    side: Side | None = None,
) -> Dataset:
    """Return the samples that `[training]` describes; text is tokenised unless that was done.

    `held_out`: of generated text the part that is never trained on. `side`: of all documents those
    that are held out by their hash, or the others. Raises DataError for data that is missing,
    empty, damaged or too short.
    """
    corpora: list[list[Corpus | TokenStore]]
    if training.dataset == "python_stdlib":
        corpora = [[StdlibCorpus()]]
    elif training.dataset == "files":
        corpora = _corpora(training)
    else:
        corpora = [[SyntheticCorpus(held_out=held_out)]]
    split = side is not None  # then a view must fill a sample, not each store of it
    stores = [[_open(part, training, tokenizer, split=split) for part in ps] for ps in corpora]
    weights = training.dataset_weights or (1.0,)
    if side is not None and side.held_out:
        # each is read once, in no proportion; the stores are those of the training all the same
        stores, weights = [[store for parts in stores for store in parts]], (1.0,)
    dataset = Dataset(
        _sources(stores, training, side=side, end=tokenizer.eos_id),
        weights=weights,
        seq_len=training.seq_len,
        seed=seed,
        tokenizer=tokenizer,
        num_epochs=training.num_epochs,
        masks_labels=training.dataset == "synthetic_masked",
        document_attention=training.document_attention,
        document_positions=training.document_positions,
        side=side,
    )
    # a store made with another tokenizer mostly shows in the first sample, before any long work
    dataset[0]
    logger.info(
        "data: %s, %s, samples of %d, %s",
        amount(len(stores), "source"),
        amount(dataset.num_tokens, "token"),
        training.seq_len,
        "repeated" if dataset.num_samples is None else f"{dataset.num_samples} in all",
    )
    return dataset


def _open(
    part: Corpus | TokenStore, training: TrainingConfig, tokenizer: Tokenizer, *, split: bool
) -> TokenStore:
    """Return the tokens of one part of the data, enough for a sample unless they are split."""
    if isinstance(part, TokenStore):
        store, name = part, part.prefix
    else:
        store = cached_store(part, tokenizer=tokenizer, cache=training.dataset_cache)
        name = part.name
    if store.num_tokens <= training.seq_len and not split:
        raise DataError(
            f"data must hold at least training.seq_len + 1 = {training.seq_len + 1} tokens, "
            f"{name} has {store.num_tokens}; add data or lower training.seq_len"
        )
    return store


def _sources(
    stores: Sequence[Sequence[TokenStore]], training: TrainingConfig, *, side: Side | None, end: int
) -> list[Source]:
    seq_len = training.seq_len
    if side is None:
        return [Source(parts, seq_len=seq_len) for parts in stores]
    names = training.dataset_path or (training.dataset,)
    if len(names) != len(stores):
        names = (", ".join(names),)
    cache = training.dataset_cache
    return [
        Source(
            [build_view(parts, side, name=name, seq_len=seq_len, end=end, cache=cache)],
            seq_len=seq_len,
        )
        for parts, name in zip(stores, names, strict=True)
    ]


def _corpora(training: TrainingConfig) -> list[list[Corpus | TokenStore]]:
    """Return the sources of `dataset_path`: one an entry if they are weighted, else one of all."""
    assert training.dataset_path, "a rule of the configuration"
    if training.dataset_weights:
        groups = [find_files(entry) for entry in training.dataset_path]
    else:
        groups = [[file for entry in training.dataset_path for file in find_files(entry)]]
    counts = Counter(file for files in groups for file in files)
    if repeated := [file for file, count in counts.items() if count > 1]:
        logger.warning(
            "dataset_path names %s more than once, as %s: their documents are read as often",
            amount(len(repeated), "file"),
            repeated[0],
        )
    corpora: list[list[Corpus | TokenStore]] = []
    for files in groups:
        stores = [TokenStore(file.with_suffix("")) for file in files if file.suffix in STORE]
        texts = tuple(file for file in files if file.suffix not in STORE)
        corpus = [FileCorpus(texts, training.dataset_text_key)] if texts else []
        corpora.append([*corpus, *stores])
    return corpora
