"""Data of the user's own, by import path, in one of three forms.

`__len__` and `__getitem__(i)`   samples by number: shuffled and repeated here, for any ranks
`__getitem__(k)` alone           the k-th sample of the run, without an end: its order is its own
`__iter__`, `state_dict()`, `load_state_dict(state)`   a stream

In all three the k-th sample of a run is the same on any number of ranks, and a run resumes at the
next one. Of a stream each rank reads every sample and keeps its own: so its state, after the last
sample of a step, is one for all ranks. (Streams that are cut among the ranks have a state each, and
go on with the same number of ranks alone.) A stream that ends begins again.

A sample is `seq_len + 1` token ids, or a mapping with `tokens` and `labels` of `seq_len` ids each,
labels -100 where no loss is due; and, if documents are told apart, `document_lengths`.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch.utils.data import get_worker_info

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.own import check_methods, describe_error, load_object, make
from torchtitan.data.dataset import IGNORED, ORDER, Dataset, tells_documents
from torchtitan.data.loader import Numbered, Samples
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import Tokenizer

KEY = "dataset"


class Indexed(Protocol):
    """Samples by number."""

    def __getitem__(self, i: int) -> Any:
        """Return a sample, always the same one for a number."""


class Streamed(Protocol):
    """Samples one after another."""

    def __iter__(self) -> Iterator[Any]:
        """Begin, or go on from the state that was loaded."""

    def state_dict(self) -> dict[str, Any]:
        """Return, as JSON can hold it, where the last iterator is."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next iterator go on from there."""


def build_own(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    seed: int,
    held_out: bool,
    sections: Mapping[str, object],
) -> Numbered:
    """Build the data that `training.dataset` names.

    `held_out`: for validation; a class may ask for it. `sections`: of the user's own.

    Raises:
        DataError: They are not there, have none of the forms, or are too short.
    """
    path = training.dataset
    offered = {
        "tokenizer": tokenizer,
        "seq_len": training.seq_len,
        "seed": seed,
        "held_out": held_out,
        **sections,
    }
    found, is_held_out = _make(path, offered)
    reader = SampleReader(path, training, vocab_size=tokenizer.vocab_size)
    parts = [path, getattr(found, "fingerprint", ""), "held out" * is_held_out]
    fingerprint = {
        "data": " ".join(filter(None, parts)),
        "tokenizer": tokenizer.fingerprint,
        "seq_len": str(training.seq_len),
        "seed": str(seed),
        "order": ORDER,
    }
    is_indexed = not _is_stream(found)
    if is_indexed and hasattr(found, "__len__"):
        source = OwnSource(found, reader)
        if not source.num_samples:
            raise DataError.at(KEY, f"'{path}' must hold samples, got none; add data")
        fingerprint["samples"] = str(source.num_samples)
        return Dataset([source], seed=seed, fingerprint=fingerprint, num_epochs=training.num_epochs)
    if held_out:
        rule = f"must have a length to validate on, and '{path}' has none; add __len__"
        raise DataError.at(KEY, rule)
    if training.num_epochs is not None:
        rule = f"needs data with a length, and '{path}' has none; remove it, or add __len__"
        raise DataError.at(("num_epochs", KEY), rule)
    if is_indexed:
        return OpenEnded(found, reader, fingerprint)
    if training.dataloader.num_workers:
        rule = (
            f"must be 0 for a stream as '{path}', which each process would read; write 0, or "
            f"give it __getitem__ in place of __iter__"
        )
        raise DataError.at(("dataloader.num_workers", KEY), rule)
    _try_stream(*(Stream(_make(path, offered)[0], reader, {}) for _ in range(2)))
    return Stream(found, reader, fingerprint)


def _make(path: str, offered: Mapping[str, object]) -> tuple[Any, bool]:
    """Return the data, and whether they are the held-out ones that were asked for."""
    try:
        found = make(path, key=KEY, offered=offered)
        check_methods(found, Streamed if _is_stream(found) else Indexed, path=path, key=KEY)
        named = load_object(path, key=KEY)
    except ConfigError as error:
        [mistake] = error.mistakes
        if isinstance(mistake, str) or mistake.keys != (KEY,):
            raise  # of a section of its own
        raise DataError(mistake) from error
    asks = callable(named) and "held_out" in inspect.signature(named).parameters
    return found, asks and bool(offered["held_out"])


def _is_stream(found: object) -> bool:
    """Tell which form data are meant to have: torch's IterableDataset has a __getitem__ too."""
    if hasattr(found, "__len__"):
        return False
    has_state = hasattr(found, "state_dict") and hasattr(found, "load_state_dict")
    return (has_state and hasattr(found, "__iter__")) or not hasattr(found, "__getitem__")


def _try_stream(straight: Stream, resumed: Stream) -> None:
    """Check that a stream goes on from its state with the next sample.

    Raises:
        DataError: It repeats or skips one.
    """
    resumed.load_state(straight.state_at(2), position=2)  # reads two
    if not torch.equal(straight[2]["tokens"], resumed[2]["tokens"]):
        rule = (
            f"'{straight.path}' must go on from its state with the next sample: after two samples "
            f"another one came from the state than without; count before each yield, and let the "
            f"state say what comes next"
        )
        raise DataError.at(KEY, rule)


class SampleReader:
    """Checks samples, and makes tensors of them."""

    def __init__(self, path: str, training: TrainingConfig, *, vocab_size: int) -> None:
        self.path, self._vocab_size = path, vocab_size
        self._seq_len, self._tells_documents = training.seq_len, tells_documents(training)

    def read(self, raw: Any, *, number: int) -> Samples:
        """Return a sample of ours; `number` is for messages.

        Raises:
            DataError: It is none.
        """
        wanted = f"{self._seq_len + 1} token ids, or tokens and labels of {self._seq_len} each"
        if self._tells_documents:
            wanted += f", and document_lengths from 1 on that add up to {self._seq_len}"
        try:
            if isinstance(raw, Mapping):
                sample = {key: _ids(raw[key]) for key in ("tokens", "labels")}
                is_right = all(ids.shape == (self._seq_len,) for ids in sample.values())
            else:
                row = _ids(raw)
                if row.shape != (self._seq_len + 1,):
                    self._refuse(number, wanted, f"ids of shape {tuple(row.shape)}")
                sample, is_right = {"tokens": row[:-1], "labels": row[1:]}, True
            if self._tells_documents:
                lengths = sample["document_lengths"] = _ids(raw["document_lengths"])
                is_right &= bool(lengths.sum() == self._seq_len and (lengths > 0).all())
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            self._refuse(number, wanted, f"{raw!r:.80} ({type(error).__name__}: {error})")
        if not is_right:
            shapes = {key: tuple(ids.shape) for key, ids in sample.items()}
            self._refuse(number, wanted, f"shapes {shapes}")
        tokens, labels = sample["tokens"], sample["labels"]
        given = torch.cat([tokens, labels[labels != IGNORED]])
        if given.min() < 0 or given.max() >= self._vocab_size:
            wanted = f"ids of the tokenizer, 0 to {self._vocab_size - 1}"
            self._refuse(number, wanted, f"{int(given.min())} to {int(given.max())}")
        return sample

    def get(self, data: Any, number: int) -> Samples:
        """Return a sample by its number in data of the user's."""
        with self.running(number):
            raw = data[number]
        return self.read(raw, number=number)

    @contextmanager
    def running(self, number: int) -> Iterator[None]:
        """Turn whatever the user's code raises inside into a DataError: SystemExit too, which would
        end a data worker, or the run, without a word."""
        try:
            yield
        except KeyboardInterrupt as error:  # of a session's signal, which workers do not get
            if get_worker_info() is None:
                raise
            raise self._raised(error, number=number) from error
        except BaseException as error:
            raise self._raised(error, number=number) from error

    def _raised(self, error: BaseException, *, number: int) -> DataError:
        said = describe_error(error)
        return DataError(f"'{self.path}' raised an error at sample {number}; mend it:\n{said}")

    def _refuse(self, number: int, wanted: str, got: str) -> None:
        raise DataError(f"sample {number} of '{self.path}' must be {wanted}, got {got}; mend it")


def _ids(raw: Any) -> torch.Tensor:
    ids = torch.as_tensor(raw)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, not {ids.dtype}")
    return ids.to(torch.int64, copy=True)  # the user's code may fill the same memory again


class OwnSource:
    """Samples by number, of a known number."""

    stores = ()

    def __init__(self, data: Any, reader: SampleReader) -> None:
        self._data, self._reader, self.num_samples = data, reader, len(data)

    def __getitem__(self, i: int) -> Samples:
        return self._reader.get(self._data, i)


class OpenEnded:
    """Samples by number, without an end."""

    num_samples: int | None = None
    stores = ()

    def __init__(self, data: Any, reader: SampleReader, fingerprint: dict[str, str]) -> None:
        self._data, self._reader, self.fingerprint = data, reader, fingerprint

    def __getitem__(self, k: int) -> Samples:
        return self._reader.get(self._data, k)


class Stream:
    """Samples one after another; those between two that are asked for are read and dropped."""

    num_samples: int | None = None
    stores = ()

    def __init__(self, data: Any, reader: SampleReader, fingerprint: dict[str, str]) -> None:
        self._data, self._reader, self.fingerprint = data, reader, fingerprint
        self._iterator: Iterator[Any] | None = None
        self._next = 0

    def __getitem__(self, k: int) -> Samples:
        self._skip_to(k)
        return self._reader.read(self._read(), number=k)

    @property
    def path(self) -> str:
        """Return its import path."""
        return self._reader.path

    def state_at(self, position: int) -> dict[str, Any]:
        """Return the stream's state before sample `position`, which is none of the past ones."""
        self._skip_to(position)
        with self._reader.running(position):  # or the state is not JSON
            state = self._data.state_dict()
            found: dict[str, Any] = json.loads(json.dumps(state))
        if found != state:
            rule = (
                f"the state of '{self.path}' must come back from JSON as it is, got {state!r:.80}"
            )
            raise DataError(f"{rule}, which comes back as {found!r:.80}; use texts, lists, numbers")
        return found

    def load_state(self, state: dict[str, Any], *, position: int) -> None:
        """Go on at sample `position`, with the stream's state before it."""
        with self._reader.running(position):
            self._data.load_state_dict(state)
        self._iterator, self._next = None, position

    def _skip_to(self, k: int) -> None:
        assert k >= self._next, f"a stream is read forwards: {k} after {self._next}"
        while self._next < k:
            self._read()

    def _read(self) -> Any:
        with self._reader.running(self._next):
            if self._iterator is None:
                self._iterator = iter(self._data)
            raw = next(self._iterator, None)
            if raw is None:
                self._iterator = iter(self._data)
                raw = next(self._iterator, None)
        if raw is None:
            raise DataError(f"'{self._reader.path}' must yield samples, got none; add data")
        self._next += 1
        return raw
