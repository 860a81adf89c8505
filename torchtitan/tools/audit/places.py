"""Where the tokens of a sample come from: document, file, row.

The order of samples leads to a source and to tokens of its stores; a store's index leads to the
document. Which file and row a document is, the store does not hold: the files are read again, not
tokenized, up to the last document asked for. Of examples some may not be learnt, and where there
are such the examples are encoded again, to see which.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.base.errors import DataError
from torchtitan.data.cache import open_cached
from torchtitan.data.dataset import Dataset, TextSource, build_samples, corpora
from torchtitan.data.loader import MapSamples, Samples, StreamSamples
from torchtitan.data.sample_log import hash_tokens
from torchtitan.data.settings import SUPERVISED
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.data import ExampleSource, build_encoder
from torchtitan.finetune.encoder import is_answered
from torchtitan.finetune.sources import find_examples, label_all
from torchtitan.job import Config, own_sections

StoreKey = tuple[int, int]
"""Number of a source, and of a store in it."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a document in a sample; tokens are counted from 0."""

    store: StoreKey
    document: int
    """Its number in the store, from 0."""
    first: int
    """Its first token in the document."""
    at: int
    """Its first token in the sample."""
    num_tokens: int


@dataclass
class Places:
    """The samples of a run, and where they come from."""

    config: Config
    dataset: MapSamples
    tokenizer: Tokenizer
    _wheres: dict[StoreKey, dict[int, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> Places:
        """Open the data of a run, tokenized first where the cache has them no more."""
        path = config.model.tokenizer_path
        tokenizer = build_tokenizer(path)
        dataset = build_samples(
            config.training,
            tokenizer=tokenizer,
            tokenizer_path=path,
            seed=config.debug.seed,
            holdout_fraction=config.validation.holdout_fraction,
            sections=own_sections(config),
        )
        return cls(config, dataset, tokenizer)

    def check(self, fingerprint: dict[str, str]) -> None:
        """Raise DataError unless these are the data that a checkpoint was trained on."""
        ours = self.dataset.fingerprint
        if changed := [
            key for key in {**fingerprint, **ours} if fingerprint.get(key) != ours.get(key)
        ]:
            raise DataError(
                f"the data must be those that the run was trained on, but {', '.join(changed)} "
                f"changed since; restore them to explain its steps"
            )

    def read(self, k: int) -> Samples:
        """Return a sample; raises DataError of a stream, which cannot go back."""
        if isinstance(self.dataset, StreamSamples):
            raise DataError(
                f"'{self.config.training.dataset}' is a stream, of which no sample can be read "
                f"again by its number; set debug.log_sample_hashes to have them logged"
            )
        return self.dataset[k]

    def hash(self, k: int) -> str | None:
        """Return the hash of a sample as it is logged; None: it cannot be read again."""
        if isinstance(self.dataset, StreamSamples):
            return None
        return hash_tokens(self.read(k)["tokens"])

    def spans(self, k: int) -> list[Span]:
        """Return what a sample's tokens come from; empty of data that do not know."""
        if not isinstance(self.dataset, Dataset):
            return []
        number, _, i = self.dataset.place_of(k)
        source = self.dataset.sources[number]
        if isinstance(source, ExampleSource):
            return [*self._of_examples(source, number, i)]
        return [*self._of_text(source, number, i)] if isinstance(source, TextSource) else []

    def _of_examples(self, source: ExampleSource, number: int, i: int) -> Iterator[Span]:
        at, [store] = 0, source.stores
        for document in source.samples.document(i):
            # the last token is only a label
            length = min(len(store.document(document)) - 1, self.config.training.seq_len)
            yield Span(store=(number, 0), document=int(document), first=0, at=at, num_tokens=length)
            at += length

    def _of_text(self, source: TextSource, number: int, i: int) -> Iterator[Span]:
        row_number, first = source.place_of(i)
        row, at = source.stores[row_number], 0
        for inside, begin, stop in row.runs(first, first + self.config.training.seq_len):
            store = row.stores[inside]
            for start in (begin, *store.boundaries(begin, stop)):
                document = store.document_at(start)
                end = min(stop, store.first_token(document + 1))
                yield Span(
                    store=(number, row_number + inside),
                    document=document,
                    first=start - store.first_token(document),
                    at=at,
                    num_tokens=end - start,
                )
                at += end - start

    @cached_property
    def _parts(self) -> dict[StoreKey, Any]:
        """What each store was made from: a corpus, examples, or the store of the user itself."""
        training = self.config.training
        if not isinstance(self.dataset, Dataset) or not self.dataset.num_tokens:
            return {}  # of the user's own
        if training.dataset in SUPERVISED:
            return {(0, 0): find_examples(training)}
        return {
            (source, number): part
            for source, parts in enumerate(corpora(training, held_out=False))
            for number, part in enumerate(parts)
        }

    def wheres(self, store: StoreKey, documents: Collection[int]) -> dict[int, str]:
        """Return file and row of documents of a store, by number."""
        known = self._wheres.setdefault(store, {})
        if missing := set(documents) - known.keys():
            for number, where in enumerate(self._read(store)):
                if number in missing:
                    known[number] = where
                    missing.remove(number)
                if not missing:
                    break
            assert not missing, "the files hold the documents of the store"
        return known

    def _read(self, store: StoreKey) -> Iterator[str]:
        """Yield file and row of each document of a store, in its order."""
        part = self._parts[store]
        if isinstance(part, TokenStore):
            yield from (f"{part.prefix} document {n}" for n in range(part.num_documents))
        elif self.config.training.dataset in SUPERVISED:
            yield from self._read_examples(part)
        else:
            pieces = part.pieces(lambda num_bytes: None)
            yield from (piece.where for piece in pieces if piece.ends_document)

    def _read_examples(self, examples: Any) -> Iterator[str]:
        assert isinstance(self.dataset, Dataset)
        [store] = self.dataset.stores
        _, notes = open_cached(Path(store.prefix).parent)
        if not notes["without_answer"]:
            yield from (example.where for example in examples.examples())
            return
        training, path = self.config.training, self.config.model.tokenizer_path
        encoder = build_encoder(training, tokenizer=self.tokenizer, tokenizer_path=path)
        encoded = label_all(examples, encoder)
        yield from (example.where for example, row in encoded if is_answered(row))

    def find(self, name: str) -> list[tuple[StoreKey, int]]:
        """Return the documents that are, or lie in, what `name` says: a file, FILE:ROW, or what
        `wheres` returns.

        Raises:
            DataError: None does.
        """
        if not self._parts:
            raise DataError(
                f"'{self.config.training.dataset}' is data of your own, which do not say what "
                f"document a sample comes from; look for a sample by its step"
            )
        found = [
            (store, number)
            for store in self._parts
            for number, where in enumerate(self._read(store))
            if names(name, where)
        ]
        if not found:
            example = next(self._read(next(iter(self._parts))))
            raise DataError(
                f"no document of the run is {name!r:.200}; write a file as its settings lead to "
                f"it, and FILE:ROW for a row; the first document is {example!r}"
            )
        return found

    def samples_of(self, store: StoreKey, document: int) -> Collection[int]:
        """Return the samples of its source that have tokens of a document."""
        assert isinstance(self.dataset, Dataset)
        source = self.dataset.sources[store[0]]
        if isinstance(source, ExampleSource):
            at = np.flatnonzero(source.samples.tokens == document)
            return [source.samples.document_at(int(i)) for i in at]
        assert isinstance(source, TextSource)
        is_view = source.stores[0].stores[0] is not source.stores[0]
        row_number, inside = (0, store[1]) if is_view else (store[1], 0)
        row = source.stores[row_number]
        one = row.stores[inside]
        begin, stop = one.first_token(document), one.first_token(document + 1)
        place = row.place(inside, begin)
        if place is None or begin == stop:
            return []
        return source.samples_with(row_number, place, place + stop - begin)


def names(name: str, where: str) -> bool:
    """Tell whether `name` means the document at `where`, as "a.jsonl line 3" or its row alone."""
    if where == name:
        return True
    file, _, row = where.rpartition(" ")
    file, _, kind = file.rpartition(" ")
    is_row = kind in ("line", "item", "row", "document") and row.isdecimal()
    return is_row and name in (file, f"{file}:{row}")
