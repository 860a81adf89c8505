"""The samples of a run, numbered in the order in which they are trained on.

`dataset[k]` is the k-th sample of the whole run, on any rank of any layout. A `Dataset` decides the
order: `sampler.py` computes from k which source the sample comes from and which of its samples it
is. A `Source` makes the sample. `TextSource` cuts one long row of tokens, documents end to end,
each closed by an end token: sample i is tokens i*S to i*S + S, the last one only a label, so that
each token is predicted once per epoch. One document per sample would fill batches with padding.
Examples to fine-tune on are another source (`sft/finetune.py`).

A dataset is small and can be sent to worker processes: it holds file names and numbers.
"""

from __future__ import annotations

import hashlib
import logging
import random
from bisect import bisect
from collections import Counter
from collections.abc import Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Protocol

import numpy as np
import torch

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.data.builtin import StdlibCorpus, SyntheticCorpus
from torchtitan.data.files import Once, alone, divide, find_all
from torchtitan.data.prepare import cached_store
from torchtitan.data.sample_log import hash_tokens
from torchtitan.data.sampler import Draw, Inverse, Mixture, Permutation
from torchtitan.data.source import Corpus, FileCorpus
from torchtitan.data.split import Side, View, build_view
from torchtitan.data.store import TokenStore

if TYPE_CHECKING:
    from torchtitan.data.loader import Samples
    from torchtitan.data.settings import TrainingConfig
    from torchtitan.data.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# part of the fingerprint: a change of the algorithms of order is a change of data
ORDER = "1"
IGNORED = -100


class Source(Protocol):
    """Samples numbered from 0, in the order of the files."""

    num_samples: int

    @property
    def stores(self) -> Sequence[TokenStore | View]:
        """Return what they are read from."""

    def __getitem__(self, i: int) -> Samples:
        """Return `tokens` and `labels`, int64 [S], and `document_lengths` where they are needed."""


class Dataset:
    """All samples of a run in training order; `dataset[k]` is `{"tokens", "labels"}`, int64 [S].

    Where documents are told apart there are `document_lengths` too, int64: the tokens of each, one
    after another, cut where the sample begins and ends.

    Args:
        sources: what samples are drawn from, in proportion to `weights`.
        seed: with the data it decides the order.
        fingerprint: what samples and order depend on, by name. A resumed run compares it.
        num_epochs: the data ends when a source was read this often; None never ends.
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
        """Return the number of sample k's source, the epoch of that, and its number there."""
        draw = self._mixture[k]
        epoch, index = divmod(draw.index, self.sources[draw.source].num_samples)
        order = self._order(Permutation, draw.source, epoch)
        return draw.source, epoch, order[index]

    def number_of(self, source: int, epoch: int, i: int) -> int:
        """Return k of what `place_of(k)` returns."""
        index = self._order(Inverse, source, epoch)[i]
        before = epoch * self.sources[source].num_samples
        return self._mixture.place(Draw(source, before + index))

    def epoch_of(self, source: int, k: int) -> int:
        """Return the epoch that a source is in after the first k samples."""
        return self._mixture.count(source, first=k) // self.sources[source].num_samples

    def _order(self, kind: type[Permutation], source: int, epoch: int) -> Permutation:
        n = self.sources[source].num_samples
        return kind(n, seed=self._seed, epoch=epoch, source=source)

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all sources."""
        return sum(store.num_tokens for source in self.sources for store in source.stores)

    @property
    def stores(self) -> list[TokenStore]:
        """Return the stores that are read whole."""
        stores = [store for source in self.sources for store in source.stores]
        return [store for store in stores if isinstance(store, TokenStore)]

    def sample_hash(self, k: int) -> str:
        """Return 16 hexadecimal digits that tell sample k's tokens from others."""
        return hash_tokens(self[k]["tokens"])


class MaskedDataset(Dataset):
    """Keeps the labels of a pseudo-random run of each sample; the others are -100."""

    def __getitem__(self, k: int) -> Samples:
        sample = super().__getitem__(k)
        labels = sample["labels"].clone()
        first, last = labelled_run(k, seq_len=len(labels), seed=self._seed)
        labels[:first] = IGNORED
        labels[last:] = IGNORED
        return {**sample, "labels": labels}


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


def tells_documents(training: TrainingConfig) -> bool:
    """Return whether samples come with the lengths of their documents."""
    return training.document_attention == "within" or training.document_positions == "restart"


class TextSource:
    """The samples of one or more rows of tokens, one row after another.

    With `document_attention = "within"` no label crosses a document's end. `vocab_size`: any id
    from there on was made by another tokenizer, and is a DataError.
    """

    def __init__(
        self, stores: Sequence[TokenStore | View], training: TrainingConfig, *, vocab_size: int
    ) -> None:
        self.stores: Sequence[TokenStore | View] = list(stores)
        self._seq_len, self._vocab_size = training.seq_len, vocab_size
        self._splits_labels = training.document_attention == "within"
        self._tells_documents = tells_documents(training)
        self._ends = list(accumulate((s.num_tokens - 1) // self._seq_len for s in stores))
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
        if self._tells_documents:
            begins = np.array(store.boundaries(first, stop), np.int64) - first
            if self._splits_labels:
                sample["labels"] = sample["labels"].clone()
                sample["labels"][torch.from_numpy(begins) - 1] = IGNORED
            inside = begins[begins < self._seq_len]
            lengths = np.diff(inside, prepend=0, append=self._seq_len)
            sample["document_lengths"] = torch.from_numpy(lengths)
        return sample

    def place_of(self, i: int) -> tuple[int, int]:
        """Return the number of the row that sample i is cut from, and its first token there."""
        number = bisect(self._ends, i)
        return number, (i - (self._ends[number - 1] if number else 0)) * self._seq_len

    def samples_with(self, number: int, first: int, stop: int) -> range:
        """Return the samples that read a token from `first` to `stop` of row `number`."""
        begin = self._ends[number - 1] if number else 0
        last = min(begin - (-stop // self._seq_len), self._ends[number])
        return range(begin + first // self._seq_len, last)

    def content_hash(self) -> str:
        """Return a SHA-256 of the contents of all stores."""
        hashes = "".join(store.content_hash() for store in self.stores)
        return hashlib.sha256(hashes.encode()).hexdigest()


def build_dataset(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    seed: int,
    held_out: bool = False,
    side: Side | None = None,
    once: Once = alone,
) -> Dataset:
    """Build the samples of text that `[training]` describes, tokenised unless that was done.

    `held_out`: of generated text the part that is never trained on. `side`: of all documents those
    that are held out by their hash, or the others. `once`: what looks for files. Raises DataError
    for data that are missing, empty, damaged or too short.
    """
    stores = [
        [_open(part, training, tokenizer, fills_sample=side is None, once=once) for part in parts]
        for parts in corpora(training, held_out=held_out, once=once)
    ]
    weights = training.weights or (1.0,)
    if side is not None and side.held_out:
        # each document once, in no proportion; the stores are the training's all the same
        stores, weights = [[store for parts in stores for store in parts]], (1.0,)
    sources = [
        TextSource(row, training, vocab_size=tokenizer.vocab_size)
        for row in _rows(stores, training, side=side, end=tokenizer.eos_id)
    ]
    masked = training.dataset == "synthetic_masked"
    dataset = (MaskedDataset if masked else Dataset)(
        sources,
        weights=weights,
        seed=seed,
        num_epochs=training.num_epochs,
        # Without document_attention and document_positions: they change no sample's tokens, so a
        # position stays valid. Whether a run may go on under others is decided elsewhere.
        fingerprint={
            "data": ",".join(source.content_hash() for source in sources),
            "tokenizer": tokenizer.fingerprint,
            "seq_len": str(training.seq_len),
            "seed": str(seed),
            "weights": ":".join(map(str, Mixture(weights).weights)),
            "masked labels": str(masked),
            "order": ORDER,
            **(side.fingerprint() if side else {}),
        },
    )
    # a store of another tokenizer mostly shows in the first sample, before any long work
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
    part: Corpus | TokenStore,
    training: TrainingConfig,
    tokenizer: Tokenizer,
    *,
    fills_sample: bool,
    once: Once,
) -> TokenStore:
    """Return the tokens of one part of the data; `fills_sample`: it has to hold one."""
    if isinstance(part, TokenStore):
        store, name = part, part.prefix
    else:
        cache = training.dataset_cache
        store = cached_store(part, tokenizer=tokenizer, cache=cache, once=once)
        name = part.name
    if store.num_tokens <= training.seq_len and fills_sample:
        rule = (
            f"data must hold at least seq_len + 1 = {training.seq_len + 1} tokens, {name} has "
            f"{store.num_tokens}; add data or lower seq_len"
        )
        raise DataError.at("seq_len", rule)
    return store


def _rows(
    stores: Sequence[Sequence[TokenStore]], training: TrainingConfig, *, side: Side | None, end: int
) -> list[Sequence[TokenStore | View]]:
    """Return what each source reads: its stores, or one view of the documents of a side."""
    if side is None:
        return [*stores]
    names = training.paths or (training.dataset,)
    if len(names) != len(stores):
        names = (", ".join(names),)
    seq_len, cache = training.seq_len, training.dataset_cache
    return [
        [build_view(parts, side, name=name, seq_len=seq_len, end=end, cache=cache)]
        for parts, name in zip(stores, names, strict=True)
    ]


def corpora(
    training: TrainingConfig, *, held_out: bool, once: Once = alone
) -> list[list[Corpus | TokenStore]]:
    """Return the parts of each source; with weights each entry is a source."""
    if training.dataset == "python_stdlib":
        return [[StdlibCorpus()]]
    if training.dataset != "files":
        return [[SyntheticCorpus(held_out=held_out)]]
    assert training.paths, "a rule of the settings"
    groups = find_all(training.paths, cache=training.dataset_cache, once=once)
    if not training.weights:
        groups = [[file for files in groups for file in files]]
    counts = Counter(file for files in groups for file in files)
    if repeated := [file for file, count in counts.items() if count > 1]:
        logger.warning(
            "dataset_path names %s more than once, as %s: their documents are read as often",
            amount(len(repeated), "file"),
            repeated[0],
        )
    sources: list[list[Corpus | TokenStore]] = []
    how = training.dataset_text_key, training.dataset_text_template
    for files in groups:
        texts, stores = divide(files)
        corpus = [FileCorpus(texts, *how)] if texts else []
        sources.append([*corpus, *map(TokenStore, stores)])
    return sources
