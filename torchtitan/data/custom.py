"""Custom data by import path, in one of two forms.

`__len__` and `__getitem__(i)`   samples by number, shuffled and repeated here
`__iter__`, `state_dict()`, `load_state_dict(state)`   a stream, which starts again at its end

In both forms the k-th sample of a run is the same on any number of ranks, and a run resumes at the
next sample. Each rank reads every sample of a stream and keeps its own, so the state after the last
sample of a step is the same for all ranks.

A sample is `seq_len + 1` token ids, or a mapping with `tokens` and `labels` of `seq_len` ids each,
labels -100 where no loss is due; and, if documents are separated, `document_lengths`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch.utils.data import get_worker_info

from torchtitan.base.custom import describe_error, instantiate
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.data.dataset import IGNORED, ORDER, Dataset, has_document_lengths
from torchtitan.data.loader import MapSamples, Samples
from torchtitan.data.settings import TrainingConfig
from torchtitan.data.tokenizer import Tokenizer

KEY = "dataset"


def build_custom(
    training: TrainingConfig, *, tokenizer: Tokenizer, seed: int, held_out: bool
) -> MapSamples:
    """Build the data that `training.dataset` names.

    Tokenizer, seed and whether the data are for validation (`held_out`) are passed to them. Raises
    DataError if the data do not exist, have another form, or are empty.
    """
    path = training.dataset
    kwargs: dict[str, Any] = {"tokenizer": tokenizer, "seq_len": training.seq_len, "seed": seed}
    kwargs |= {"held_out": held_out, **training.dataset_options}
    try:
        data = instantiate(path, key=KEY, kwargs=kwargs)
    except ConfigError as error:
        [mistake] = error.mistakes
        if isinstance(mistake, str) or mistake.keys != (KEY,):
            raise  # of its options
        raise DataError(mistake) from error
    reader = SampleReader(path, training, vocab_size=tokenizer.vocab_size)
    parts = [path, getattr(data, "fingerprint", ""), "held out" * held_out]
    fingerprint = {
        "data": " ".join(filter(None, parts)),
        "tokenizer": tokenizer.fingerprint,
        "seq_len": str(training.seq_len),
        "seed": str(seed),
        "order": ORDER,
    }
    if hasattr(data, "__len__"):
        if len(data) == 0:
            raise DataError.at(KEY, f"'{path}' must hold samples, got none")
        fingerprint["samples"] = str(len(data))
        source = IndexedSamples(data, reader)
        return Dataset([source], seed=seed, fingerprint=fingerprint, num_epochs=training.num_epochs)
    if not (hasattr(data, "__iter__") and hasattr(data, "load_state_dict")):
        rule = f"'{path}' must have __len__ and __getitem__, or __iter__ and load_state_dict"
        raise DataError.at(KEY, rule)
    if held_out or training.num_epochs is not None:
        keys = (KEY,) if held_out else ("num_epochs", KEY)
        raise DataError.at(keys, f"needs data with __len__, and '{path}' has none")
    if training.dataloader.num_workers:
        rule = f"must be 0 for a stream such as '{path}', because each worker would read all of it"
        raise DataError.at(("dataloader.num_workers", KEY), rule)
    return CustomStream(data, reader, fingerprint)


def _as_json(state: dict[str, Any]) -> dict[str, Any]:
    """Return a state after a round trip through JSON; raise DataError if that changes it."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(f"the state of a stream must be JSON: {error}") from error
    if copy != state:
        raise DataError(f"JSON must not change the state of a stream: {state!r:.80}")
    return copy


class SampleReader:
    """Checks custom samples and converts them to tensors."""

    def __init__(self, path: str, training: TrainingConfig, *, vocab_size: int) -> None:
        self.path, self._vocab_size = path, vocab_size
        self._seq_len, self._has_lengths = training.seq_len, has_document_lengths(training)

    @contextmanager
    def as_data_error(self, number: int) -> Iterator[None]:
        """Raise an error of custom code as a DataError. SystemExit too: it would end the run."""
        try:
            yield
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # a signal of the session reaches this process, not its workers
            if isinstance(error, KeyboardInterrupt) and get_worker_info() is None:
                raise
            where = f"'{self.path}' at sample {number}"
            raise DataError(f"{where} raised an error:\n{describe_error(error)}") from error

    def read(self, raw: Any, *, number: int) -> Samples:
        """Return a sample of tensors; raise DataError if its form is wrong."""
        with self.as_data_error(number):
            if isinstance(raw, Mapping):
                sample = {key: _ids(raw[key]) for key in ("tokens", "labels")}
            else:
                row = _ids(raw)
                sample = {"tokens": row[:-1], "labels": row[1:]}
            for key, ids in sample.items():
                if ids.shape != (self._seq_len,):
                    shape = tuple(ids.shape)
                    raise ValueError(f"{key} must have the shape ({self._seq_len},), got {shape}")
                used = ids[ids != IGNORED] if key == "labels" else ids
                if len(used) and not 0 <= used.min() <= used.max() < self._vocab_size:
                    got = f"{used.min()} to {used.max()}"
                    raise ValueError(f"{key} must be in 0..{self._vocab_size - 1}, got {got}")
            if self._has_lengths:
                lengths = sample["document_lengths"] = _ids(raw["document_lengths"])
                if lengths.sum() != self._seq_len or lengths.min() < 1:
                    raise ValueError(f"document_lengths must add up to {self._seq_len}")
        return sample


def _ids(raw: Any) -> torch.Tensor:
    ids = torch.as_tensor(raw)
    if ids.is_floating_point() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, got {ids.dtype}")
    return ids.to(torch.int64, copy=True)  # custom code may reuse the same memory


class IndexedSamples:
    """A source of samples by number."""

    stores = ()

    def __init__(self, data: Any, reader: SampleReader) -> None:
        self._data, self._reader, self.num_samples = data, reader, len(data)

    def __getitem__(self, i: int) -> Samples:
        with self._reader.as_data_error(i):
            raw = self._data[i]
        return self._reader.read(raw, number=i)


class CustomStream:
    """Samples in order. Samples between two requested ones are read and dropped."""

    num_samples: int | None = None

    def __init__(self, data: Any, reader: SampleReader, fingerprint: dict[str, str]) -> None:
        self._data, self._reader, self.fingerprint = data, reader, fingerprint
        self._iterator: Iterator[Any] | None = None
        self._next = 0
        self._loaded: dict[str, Any] | None = None
        """The loaded state, until a sample is read."""

    def __getitem__(self, k: int) -> Samples:
        self._skip_to(k)
        return self._reader.read(self._read(), number=k)

    def state_at(self, position: int) -> dict[str, Any]:
        """Return the state before a sample that has not been read."""
        self._skip_to(position)
        with self._reader.as_data_error(position):
            return _as_json(self._data.state_dict())

    def load_state(self, state: dict[str, Any], *, position: int) -> None:
        """Continue at sample `position`, given the state before it."""
        self._iterator, self._next, self._loaded = None, position, deepcopy(state)
        with self._reader.as_data_error(position):
            self._data.load_state_dict(state)

    def _skip_to(self, k: int) -> None:
        assert k >= self._next, f"a stream is read forwards: {k} after {self._next}"
        while self._next < k:
            self._read()

    def _read(self) -> Any:
        with self._reader.as_data_error(self._next):
            if self._iterator is None:
                self._iterator = iter(self._data)
            raw = next(self._iterator, None)
            if raw is None:  # at the end of a pass, also right after `load_state`
                self._iterator, self._loaded = iter(self._data), None
                raw = next(self._iterator)
            is_unchanged = self._loaded is not None and self._data.state_dict() == self._loaded
            self._loaded = None
        if is_unchanged:
            raise DataError(
                f"'{self._reader.path}' at sample {self._next}: its state must change when samples "
                f"are drawn"
            )
        self._next += 1
        return raw
