"""The documents that a sample's tokens come from, with their file and row.

The order of samples leads to a source and to tokens of its stores, and the index of a store to the
document. A store does not hold files and rows, so the files are read again up to the last document,
without tokenizing them. If some examples have no answer to learn, the examples are also encoded
again, to leave out the same ones.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from torchtitan.base.errors import DataError
from torchtitan.data.corpus import Corpus
from torchtitan.data.dataset import Dataset, build_samples
from torchtitan.data.documents import TextSource, find_corpora
from torchtitan.data.holdout import goes_to_holdout
from torchtitan.data.loader import MapSamples, Samples, StreamSamples
from torchtitan.data.prepare import read_notes
from torchtitan.data.settings import SUPERVISED
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.data import ExampleSource, build_encoder
from torchtitan.finetune.encoder import is_answered
from torchtitan.finetune.sources import find_examples, label_all
from torchtitan.job import Config

StoreKey = tuple[int, int]
"""Number of a source, and of a store in it."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """A part of a document in a sample. Tokens are counted from 0."""

    store: StoreKey
    document: int
    """Number of the document in the store, from 0."""
    first: int
    """First token in the document."""
    at: int
    """First token in the sample."""
    num_tokens: int


@dataclass
class RunData:
    """The samples of a run and their documents."""

    config: Config
    dataset: MapSamples
    tokenizer: Tokenizer
    _names: dict[tuple[StoreKey, int], str] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config) -> RunData:
        """Open the data of a run. They are tokenized again if they are no longer in the cache."""
        path = config.model.tokenizer_path
        tokenizer = build_tokenizer(path)
        dataset = build_samples(
            config.training,
            tokenizer=tokenizer,
            tokenizer_path=path,
            seed=config.debug.seed,
            holdout_fraction=config.validation.holdout_fraction,
        )
        return cls(config, dataset, tokenizer)

    def check(self, fingerprint: dict[str, str] | None) -> None:
        """Raise DataError unless a checkpoint was trained on these data. None: no checkpoint."""
        ours = self.dataset.fingerprint
        fingerprint = ours if fingerprint is None else fingerprint
        if changed := [k for k in {**fingerprint, **ours} if fingerprint.get(k) != ours.get(k)]:
            raise DataError(
                f"the data must be the same as in training, but {', '.join(changed)} changed "
                f"since; restore them"
            )

    def read(self, k: int) -> Samples:
        """Return a sample. Raise DataError for a stream, which cannot go back."""
        if isinstance(self.dataset, StreamSamples):
            raise DataError(
                f"'{self.config.training.dataset}' is a stream, whose samples cannot be read again"
            )
        return self.dataset[k]

    def hash(self, k: int) -> str | None:
        """Return the hash of a sample as examples/sample_log.py logs it. None: a stream."""
        if isinstance(self.dataset, StreamSamples):
            return None
        tokens = self.read(k)["tokens"]
        return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:16]

    def spans(self, k: int) -> list[Span]:
        """Return the documents in a sample. Empty for custom data, which do not have documents."""
        if not isinstance(self.dataset, Dataset):
            return []
        number, _, i = self.dataset.place_of(k)
        source = self.dataset.sources[number]
        if isinstance(source, ExampleSource):
            return [*self._spans_of_examples(source, number, i)]
        return [*self._spans_of_text(source, number, i)] if isinstance(source, TextSource) else []

    def _spans_of_examples(self, source: ExampleSource, number: int, i: int) -> Iterator[Span]:
        at, [store] = 0, source.stores
        for document in source.samples.document(i):
            # the last token is only a label
            length = min(len(store.document(document)) - 1, self.config.training.seq_len)
            yield Span(store=(number, 0), document=int(document), first=0, at=at, num_tokens=length)
            at += length

    def _spans_of_text(self, source: TextSource, number: int, i: int) -> Iterator[Span]:
        row, start = source.place_of(i)
        store, at = source.stores[row], 0
        stop = start + self.config.training.seq_len
        for token in (start, *store.boundaries(start, stop)):
            document = _document_at(store, token)
            end = min(stop, store.first_token(document + 1))
            yield Span(
                store=(number, row),
                document=document,
                first=token - store.first_token(document),
                at=at,
                num_tokens=end - token,
            )
            at += end - token

    def samples_of(self, store: StoreKey, document: int) -> Collection[int]:
        """Return the samples of its source that have tokens of a document."""
        assert isinstance(self.dataset, Dataset)
        source = self.dataset.sources[store[0]]
        if isinstance(source, ExampleSource):
            at = np.flatnonzero(source.samples.tokens == document)
            return [_document_at(source.samples, int(i)) for i in at]
        assert isinstance(source, TextSource)
        row = source.stores[store[1]]
        start, stop = row.first_token(document), row.first_token(document + 1)
        if start == stop:
            return []
        seq_len, begin = self.config.training.seq_len, source.ends[store[1] - 1] if store[1] else 0
        last = min(begin - (-stop // seq_len), source.ends[store[1]])
        return range(begin + start // seq_len, last)

    def names(self, spans: Iterable[Span]) -> dict[tuple[StoreKey, int], str]:
        """Return file and row of each document, by store and number."""
        missing: dict[StoreKey, set[int]] = defaultdict(set)
        for span in spans:
            if (span.store, span.document) not in self._names:
                missing[span.store].add(span.document)
        for store, documents in missing.items():
            for number, name in enumerate(self._read_names(store)):
                if number in documents:
                    self._names[store, number] = name
                    documents.remove(number)
                if not documents:
                    break
            assert not documents, "the files have the documents of the store"
        return self._names

    def find(self, name: str) -> list[tuple[StoreKey, int]]:
        """Return store and number of the documents of a FILE, a FILE:ROW, or a name of `names`;
        raise DataError if no document has this name."""
        if not self._parts:
            raise DataError(
                f"'{self.config.training.dataset}' is custom data, whose documents are unknown; "
                f"use --step"
            )
        matches = [
            (store, number)
            for store in self._parts
            for number, stored_name in enumerate(self._read_names(store))
            if _matches(name, stored_name)
        ]
        if not matches:
            example = next(self._read_names(next(iter(self._parts))))
            raise DataError(
                f"the run has no document {name!r:.200}; write FILE as in its settings, or "
                f"FILE:ROW; its first document is {example!r}"
            )
        return matches

    @cached_property
    def _parts(self) -> dict[StoreKey, Any]:
        """The origin of each store: a corpus, examples, or a store of the user."""
        training = self.config.training
        if not isinstance(self.dataset, Dataset) or not self.dataset.num_tokens:
            return {}  # custom data
        if training.dataset in SUPERVISED:
            return {(0, 0): find_examples(training)}
        return {
            (source, number): part
            for source, parts in enumerate(find_corpora(training))
            for number, part in enumerate(parts)
        }

    def _read_names(self, store: StoreKey) -> Iterator[str]:
        """Yield file and row of each document of a store, in order."""
        part = self._parts[store]
        if isinstance(part, TokenStore):
            yield from (f"{part.prefix} document {n}" for n in range(part.num_documents))
        elif self.config.training.dataset not in SUPERVISED:
            yield from self._read_trained(part)
        else:
            assert isinstance(self.dataset, Dataset)
            [examples] = self.dataset.stores
            if not read_notes(Path(examples.prefix).parent)["without_answer"]:
                yield from (row.where for row in part.pieces())
                return
            training, path = self.config.training, self.config.model.tokenizer_path
            encoder = build_encoder(training, tokenizer=self.tokenizer, tokenizer_path=path)
            encoded = label_all(part, encoder)
            yield from (example.where for example, row in encoded if is_answered(row))

    def _read_trained(self, corpus: Corpus) -> Iterator[str]:
        """Yield file and row of each document that is trained on. Held-out ones are encoded."""
        fraction, text = self.config.validation.holdout_fraction, ""
        for piece in corpus.pieces():
            if fraction is not None:
                text += piece.text
            if piece.ends_document:
                ids = np.array([] if fraction is None else self.tokenizer.encode(text), np.uint32)
                if fraction is None or not goes_to_holdout(ids, fraction):
                    yield piece.where
                text = ""


def _document_at(store: TokenStore, token: int) -> int:
    """Return the number of the document that holds a token."""
    return bisect_right(range(store.num_documents), token, key=store.first_token) - 1


def _matches(name: str, document: str) -> bool:
    """Return whether a document, such as "a.jsonl line 3", is `name`, "a.jsonl" or "a.jsonl:3"."""
    file, _, row = document.rpartition(" ")
    file, _, unit = file.rpartition(" ")
    is_row = unit in ("line", "item", "row", "document") and row.isdecimal()
    return name == document or (is_row and name in (file, f"{file}:{row}"))
