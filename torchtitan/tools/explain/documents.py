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
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from torch import Tensor

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.urls import is_url
from torchtitan.data.corpus import Corpus
from torchtitan.data.dataset import Dataset, build_samples
from torchtitan.data.documents import TextSource, find_corpora
from torchtitan.data.holdout import goes_to_holdout
from torchtitan.data.prepare import read_notes
from torchtitan.data.settings import PREFERENCES, SUPERVISED
from torchtitan.data.store import TokenStore
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.finetune.data import ExampleSource, build_encoder
from torchtitan.finetune.encoder import is_answered
from torchtitan.finetune.sources import find_sources, label_all, parser_of
from torchtitan.job import Config

StoreKey = tuple[int, int]
"""Number of a source, and of a store in it."""


def local_settings(config: Config, *, cache: str, may_fetch: bool) -> Config:
    """Return stored settings with the user's cache, since they may come from a stranger; raise
    ConfigError if they name a URL."""
    urls = [path for path in config.training.dataset_path if is_url(path)]
    if urls and not may_fetch:
        rule = f"of the run names {urls[0]!r}; pass --fetch to read it"
        raise ConfigError.at("training.dataset_path", rule)
    return replace(config, training=replace(config.training, dataset_cache=cache))


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

    def __str__(self) -> str:
        return f"tokens {self.first} to {self.first + self.num_tokens - 1}"


class RunData:
    """The samples of a run and their documents."""

    def __init__(self, config: Config) -> None:
        """Open the data. They are tokenized again if they are no longer in the cache. Raises
        DataError if they are custom data, which do not have documents."""
        training, path = config.training, config.model.tokenizer_path
        if is_import_path(training.dataset) or training.dataset in PREFERENCES:
            rule = (
                f"of the run is custom or of pairs, its documents are unknown: '{training.dataset}'"
            )
            raise DataError.at("training.dataset", rule)
        self._config, self.tokenizer = config, build_tokenizer(path)
        dataset = build_samples(
            training,
            tokenizer=self.tokenizer,
            tokenizer_path=path,
            seed=config.debug.seed,
            holdout_fraction=config.validation.holdout_fraction,
        )
        assert isinstance(dataset, Dataset)
        self.dataset, self._origins = dataset, dict[StoreKey, Corpus | TokenStore]()
        if training.dataset in SUPERVISED:
            for source, corpus in enumerate(find_sources(training)):
                self._origins[source, 0] = corpus
        else:
            for source, parts in enumerate(find_corpora(training)):
                self._origins |= {(source, number): part for number, part in enumerate(parts)}

    def check(self, fingerprint: dict[str, str] | None) -> None:
        """Raise DataError unless a checkpoint was trained on these data. None: no checkpoint."""
        ours = self.dataset.fingerprint
        fingerprint = ours if fingerprint is None else fingerprint
        if changed := [k for k in {**fingerprint, **ours} if fingerprint.get(k) != ours.get(k)]:
            raise DataError(
                f"the data must be the same as in training, but {', '.join(changed)} changed "
                f"since; restore them"
            )

    def tokens(self, k: int) -> Tensor:
        """Return the tokens of a sample."""
        return self.dataset[k]["tokens"]

    def hash(self, k: int) -> str:
        """Return the hash of a sample as examples/sample_log.py logs it."""
        return hashlib.sha256(self.tokens(k).numpy().tobytes()).hexdigest()[:16]

    def spans(self, k: int) -> Iterator[Span]:
        """Yield the documents in a sample."""
        number, _, i = self.dataset.place_of(k)
        source, seq_len, at = self.dataset.sources[number], self._config.training.seq_len, 0
        if isinstance(source, ExampleSource):
            [store], key = source.stores, (number, 0)
            # the last token of an example is only a label
            ends = {n: min(len(store.document(n)) - 1, seq_len) for n in source.samples.document(i)}
            parts = [(int(document), 0, end) for document, end in ends.items()]
        else:
            assert isinstance(source, TextSource)
            row, start = source.place_of(i)
            store, key, stop = source.stores[row], (number, row), start + seq_len
            parts = []
            for token in (start, *store.boundaries(start, stop)):
                document = _document_at(store, token)
                end, begin = store.first_token(document + 1), store.first_token(document)
                parts.append((document, token - begin, min(stop, end) - token))
        for document, first, num_tokens in parts:
            yield Span(store=key, document=document, first=first, at=at, num_tokens=num_tokens)
            at += num_tokens

    def samples_of(self, store: StoreKey, document: int) -> Collection[int]:
        """Return the samples of its source that have tokens of a document."""
        source = self.dataset.sources[store[0]]
        if isinstance(source, ExampleSource):
            at = np.flatnonzero(source.samples.tokens == document)
            return [_document_at(source.samples, int(i)) for i in at]
        assert isinstance(source, TextSource)
        row = source.stores[store[1]]
        start, stop = row.first_token(document), row.first_token(document + 1)
        if start == stop:
            return []
        seq_len, begin = self._config.training.seq_len, source.ends[store[1] - 1] if store[1] else 0
        last = min(begin - (-stop // seq_len), source.ends[store[1]])
        return range(begin + start // seq_len, last)

    def names(self, spans: Iterable[Span]) -> dict[tuple[StoreKey, int], str]:
        """Return file and row of each document, by store and number."""
        names, missing = {}, defaultdict[StoreKey, set[int]](set)
        for span in spans:
            missing[span.store].add(span.document)
        for store, documents in missing.items():
            for number, name in enumerate(self._read_names(store)):
                if number in documents:
                    names[store, number] = name
                    documents.remove(number)
                if not documents:
                    break
            assert not documents, "the files have the documents of the store"
        return names

    def find(self, name: str) -> list[tuple[StoreKey, int]]:
        """Return store and number of the documents of a FILE, a FILE:ROW, or a name of `names`;
        raise DataError if no document has this name."""
        matches = [
            (store, number)
            for store in self._origins
            for number, stored_name in enumerate(self._read_names(store))
            if _matches(name, stored_name)
        ]
        if not matches:
            example = next(self._read_names(next(iter(self._origins))))
            raise DataError(
                f"the run has no document {name!r:.200}; write FILE as in its settings, or "
                f"FILE:ROW; its first document is {example!r}"
            )
        return matches

    def _read_names(self, store: StoreKey) -> Iterator[str]:
        """Yield file and row of each document of a store, in order."""
        origin, training = self._origins[store], self._config.training
        if isinstance(origin, TokenStore):
            yield from (f"{origin.prefix} document {n}" for n in range(origin.num_documents))
        elif training.dataset not in SUPERVISED:
            yield from self._read_trained(origin)
        elif (
            read_notes(Path(self.dataset.stores[store[0]].prefix).parent)["without_answer"]
            or training.train_on == "each"
        ):
            path = self._config.model.tokenizer_path
            encoder = build_encoder(training, tokenizer=self.tokenizer, tokenizer_path=path)
            encoded = label_all(origin, encoder, parse=parser_of(training))
            yield from (example.where for example, row in encoded if is_answered(row))
        else:
            yield from (row.where for row in origin.pieces())

    def _read_trained(self, corpus: Corpus) -> Iterator[str]:
        """Yield file and row of each document that is trained on. Held-out ones are encoded."""
        fraction, text = self._config.validation.holdout_fraction, ""
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
