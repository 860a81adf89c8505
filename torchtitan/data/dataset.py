"""The samples of a run, numbered in training order.

`dataset[k]` is the k-th sample of the run, on any rank of any layout. A `Dataset` decides the
order: `sampler.py` computes from k which source the sample comes from, and its number in that
source. A `Source` makes the sample. `TextSource` cuts one long row of tokens, the
documents in order, each followed by an end token: sample i is the tokens i*S to i*S + S, the last
one only a label, so that each token is predicted once per epoch. One document per sample would fill
batches with padding. Fine-tuning examples are another source (`finetune/data.py`).

A dataset holds only file names and numbers, so it is cheap to send to worker processes.
"""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import DataError, Violation
from torchtitan.base.files import Once, alone
from torchtitan.base.log import plural
from torchtitan.data.sampler import Draw, Inverse, Mixture, Permutation
from torchtitan.data.settings import SUPERVISED

if TYPE_CHECKING:
    from torchtitan.data.holdout import Holdout
    from torchtitan.data.loader import MapSamples, Samples
    from torchtitan.data.settings import TrainingConfig
    from torchtitan.data.store import TokenStore
    from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
# part of the fingerprint: another algorithm of the order is other data
ORDER = "1"
IGNORED = -100


class Source(Protocol):
    """Samples numbered from 0, in the order of the files."""

    num_samples: int

    @property
    def stores(self) -> Sequence[TokenStore]:
        """Return the stores that samples are read from."""

    def __getitem__(self, i: int) -> Samples:
        """Return `tokens` and `labels`, int64 [S], and `document_lengths` if they are needed."""


class Dataset:
    """All samples of a run in training order; `dataset[k]` is `{"tokens", "labels"}`, int64 [S].

    If documents are separated, `document_lengths`, int64, holds the number of tokens of each
    document in the sample, cut at both ends of the sample.

    Args:
        sources: Samples are drawn from these in proportion to `weights`.
        weights: Weight of each source.
        seed: Decides the order, together with the data.
        fingerprint: Everything that decides samples and order, by name. A resumed run compares it.
        num_epochs: The data end when a source was read this many times. None never ends.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        weights: Sequence[float] = (1.0,),
        seed: int,
        fingerprint: dict[str, str],
        num_epochs: int | None = None,
    ) -> None:
        self.sources, self._mixture, self._seed = list(sources), Mixture(weights), seed
        self.fingerprint = fingerprint
        self.num_samples: int | None = None
        if num_epochs is not None:
            self.num_samples = min(
                self._mixture.exhausted_after(i, num_samples=num_epochs * source.num_samples)
                for i, source in enumerate(sources)
            )

    def __getitem__(self, k: int) -> Samples:
        number, _, i = self.place_of(k)
        return self.sources[number][i]

    def place_of(self, k: int) -> tuple[int, int, int]:
        """Return the source of sample k, the epoch of that source, and the number in it."""
        draw = self._mixture[k]
        epoch, index = divmod(draw.index, self.sources[draw.source].num_samples)
        order = self._order(Permutation, draw.source, epoch)
        return draw.source, epoch, order[index]

    def number_of(self, source: int, epoch: int, i: int) -> int:
        """Return k, given the result of `place_of(k)`."""
        index = self._order(Inverse, source, epoch)[i]
        before = epoch * self.sources[source].num_samples
        return self._mixture.number_of(Draw(source, before + index))

    def epoch_of(self, source: int, k: int) -> int:
        """Return the epoch of a source after the first k samples."""
        return self._mixture.count(source, first=k) // self.sources[source].num_samples

    def _order(self, order: type[Permutation], source: int, epoch: int) -> Permutation:
        n = self.sources[source].num_samples
        return order(n, seed=self._seed, epoch=epoch, source=source)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sources."""
        return sum(store.num_tokens for source in self.sources for store in source.stores)

    @property
    def stores(self) -> list[TokenStore]:
        """Return the stores that are read completely."""
        return [store for source in self.sources for store in source.stores]


def has_document_lengths(training: TrainingConfig) -> bool:
    """Return whether samples have the lengths of their documents."""
    return training.attn_mask_type == "block_causal" or training.reset_positions


class TextSource:
    """The samples of one or more rows of tokens, in order.

    With `attn_mask_type = "block_causal"` no label crosses a document's end.

    Args:
        stores: Rows of tokens.
        training: Settings of the samples.
        vocab_size: Upper limit of the ids. A larger id, made by another tokenizer, is a DataError.
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
        self._ends = list(accumulate((max(0, s.num_tokens - 1)) // self._seq_len for s in stores))
        self.num_samples = self._ends[-1]

    def __getitem__(self, i: int) -> Samples:
        number, first = self.place_of(i)
        store, stop = self.stores[number], first + self._seq_len + 1
        tokens = store.read(first, stop)
        if tokens.max() >= self._vocab_size or tokens.min() < 0:
            raise DataError(
                f"the data must hold ids of the tokenizer, 0 to {self._vocab_size - 1}, found "
                f"{tokens.min()} to {tokens.max()}; the store was made with another tokenizer than "
                f"model.tokenizer_path"
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
        number = bisect(self._ends, i)
        return number, (i - (self._ends[number - 1] if number else 0)) * self._seq_len

    def samples_with(self, number: int, first: int, stop: int) -> range:
        """Return the samples that read a token between `first` and `stop` of row `number`."""
        begin = self._ends[number - 1] if number else 0
        last = min(begin - (-stop // self._seq_len), self._ends[number])
        return range(begin + first // self._seq_len, last)

    def content_hash(self) -> str:
        """Return a SHA-256 of the contents of all stores."""
        hashes = "".join(store.content_hash() for store in self.stores)
        return hashlib.sha256(hashes.encode()).hexdigest()


DATASETS: Mapping[str, str] = {  # imported when used: a run on text loads no Jinja
    **dict.fromkeys(SUPERVISED, "torchtitan.finetune.data:build_examples"),
    "custom": "torchtitan.data.custom:build_custom",
}
"""Functions that build samples, by `training.dataset`; `build_dataset` builds text."""


def _builder(dataset: str) -> Callable[..., MapSamples]:
    module, name = DATASETS[dataset].split(":")
    builder: Callable[..., MapSamples] = getattr(import_module(module), name)
    return builder


def build_samples(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    seed: int,
    holdout_fraction: float | None = None,
    held_out: bool = False,
    keys_of_validation: Collection[str] = ("holdout_fraction",),
    once: Once = alone,
) -> MapSamples:
    """Build the samples that the settings describe, tokenized first if necessary.

    Args:
        training: Data and samples.
        tokenizer: Encodes the text.
        tokenizer_path: Where the tokenizer is from, and its chat template.
        seed: Decides the order.
        holdout_fraction: Fraction of the documents that `held_out` selects by their hash.
        held_out: Select what is never trained on: without a fraction, a part of generated data.
        keys_of_validation: Settings that are from [validation]. The others are from [training].
        once: Finds files in one process of this machine.

    Raises:
        DataError: Data are missing, empty, damaged or too short.
    """
    holdout = None
    if holdout_fraction is not None:
        from torchtitan.data.holdout import Holdout

        holdout, held_out = Holdout(holdout_fraction, held_out=held_out), False
    build: Callable[..., MapSamples] = partial(build_dataset, holdout=holdout, once=once)
    if is_import_path(training.dataset):
        build = _builder("custom")
    elif training.dataset in DATASETS:
        build = partial(
            _builder(training.dataset), tokenizer_path=tokenizer_path, holdout=holdout, once=once
        )
    try:
        return build(training, tokenizer=tokenizer, seed=seed, held_out=held_out)
    except DataError as error:
        is_of_validation = error.key in keys_of_validation
        raise error.within("validation" if is_of_validation else "training") from error


def check_fills_batch(
    samples: MapSamples, training: TrainingConfig, *, global_batch: int, accumulation: int
) -> None:
    """Raise DataError if the samples do not fill one global batch."""
    if samples.num_samples is None or samples.num_samples >= global_batch:
        return
    assert training.num_epochs is not None, "without it the data never end"
    # without accumulation the global batch is what the ranks read at once
    to_lower = ["local_batch_size"] if accumulation == 1 else []
    if training.global_batch_size != -1:
        to_lower.append("global_batch_size")
    rule = (
        f"the data must fill a global batch of {global_batch} samples of {training.seq_len} "
        f"tokens, got {plural(samples.num_samples, 'sample')} in "
        f"{plural(training.num_epochs, 'epoch')}; add data, or lower {' and '.join(to_lower)}, or "
        f"seq_len"
    )
    raise DataError(Violation((*to_lower, "seq_len"), rule).within("training"))


def build_dataset(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    seed: int,
    held_out: bool = False,
    holdout: Holdout | None = None,
    once: Once = alone,
) -> Dataset:
    """Build the samples of text that `[training]` describes, tokenized first if necessary.

    Args:
        training: Data and samples.
        tokenizer: Encodes the text.
        seed: Decides the order.
        held_out: Select the part of generated text that is never trained on.
        holdout: Select the documents that are held out by their hash, or the remaining ones.
        once: Finds files in one process of this machine.

    Raises:
        DataError: Data are missing, empty, damaged or too short.
    """
    stores = _open_stores(
        training, tokenizer=tokenizer, held_out=held_out, holdout=holdout, once=once
    )
    weights = training.weights or (1.0,)
    if holdout is not None and holdout.held_out:
        # each document once, without weights
        stores, weights = [[store for group in stores for store in group]], (1.0,)
    sources = [TextSource(row, training, vocab_size=tokenizer.vocab_size) for row in stores]
    for source in sources:
        if not source.num_samples:
            names = ", ".join(training.paths) or training.dataset
            needed = f"seq_len + 1 = {training.seq_len + 1} tokens"
            most = max(store.num_tokens for store in source.stores)
            got = f"at most {most} in a store of {names:.200}"
            if holdout is not None:
                raise holdout.too_small(needed=needed, got=got)
            rule = f"data must hold at least {needed}, got {got}; add data or lower seq_len"
            raise DataError.at("seq_len", rule)
    cls: type[Dataset] = Dataset
    if masked := training.dataset == "synthetic_masked":
        cls = import_module("torchtitan.data.masked").MaskedDataset
    dataset = cls(
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
            **(holdout.fingerprint() if holdout else {}),
        },
    )
    # ids of another tokenizer are usually found in the first sample, before any long work
    dataset[0]
    num_sources, num_tokens = plural(len(stores), "source"), plural(dataset.num_tokens, "token")
    total = "repeated" if dataset.num_samples is None else f"{dataset.num_samples} in all"
    logger.info("data: %s, %s, samples of %d, %s", num_sources, num_tokens, training.seq_len, total)
    return dataset


def _open_stores(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    held_out: bool,
    holdout: Holdout | None,
    once: Once,
) -> list[list[TokenStore]]:
    """Return the stores of each source, tokenized first if necessary."""
    stores: list[list[TokenStore]] = []
    from torchtitan.data.corpus import corpora
    from torchtitan.data.prepare import cached_store
    from torchtitan.data.store import TokenStore

    for parts in corpora(training, held_out=held_out, once=once):
        stores.append([])
        for part in parts:
            if isinstance(part, TokenStore):
                store = part if holdout is None else _side_of(part, holdout)
            else:
                cache = training.dataset_cache
                store = cached_store(
                    part, tokenizer=tokenizer, cache=cache, holdout=holdout, once=once
                )
            stores[-1].append(store)
    return stores


def _side_of(store: TokenStore, holdout: Holdout) -> TokenStore:
    """Return one side of a store of the user, which `torchtitan prepare` has divided."""
    from torchtitan.data.holdout import held_out_prefix
    from torchtitan.data.store import TokenStore

    twin = held_out_prefix(store.prefix, holdout.fraction)
    if not Path(f"{twin}.idx").exists():
        rule = (
            f"needs the documents that were held out of the token store {store.prefix}, and "
            f"{twin}.idx does not exist; write both with torchtitan prepare --holdout_fraction "
            f"{holdout.fraction}, or name other data in validation.dataset_path"
        )
        raise DataError.at("holdout_fraction", rule)
    return TokenStore(twin) if holdout.held_out else store
