"""Custom data by import path, in one of three forms.

`__len__` and `__getitem__(i)`   samples by number, shuffled and repeated here, for any ranks
`__getitem__(k)` only            the k-th sample of the run, without an end, in its own order
`__iter__`, `state_dict()`, `load_state_dict(state)`   a stream, which starts again at its end

In all forms the k-th sample of a run is the same on any number of ranks, and a run resumes at the
next sample. Each rank reads every sample of a stream and keeps its own, so the state after the last
sample of a step is the same for all ranks.

A sample is `seq_len + 1` token ids, or a mapping with `tokens` and `labels` of `seq_len` ids each,
labels -100 where no loss is due; and, if documents are separated, `document_lengths`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from itertools import islice
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

    Args:
        training: Names the data and their options; sequence length and epochs.
        tokenizer: Passed to the data.
        seed: Decides the order of samples by number. Passed to the data too.
        held_out: Whether the data are for validation. Passed to the data too.

    Raises:
        DataError: The data do not exist, have another form, or are empty.
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
    has_length = hasattr(data, "__len__")
    has_state = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
    # torch's IterableDataset has __getitem__ too
    is_stream = not has_length and has_state and hasattr(data, "__iter__")
    if not is_stream and not hasattr(data, "__getitem__"):
        rule = f"'{path}' must have __getitem__(i), or __iter__(), state_dict() and load_state_dict"
        raise DataError.at(KEY, rule)
    reader = SampleReader(path, training, vocab_size=tokenizer.vocab_size)
    parts = [path, getattr(data, "fingerprint", ""), "held out" * held_out]
    fingerprint = {
        "data": " ".join(filter(None, parts)),
        "tokenizer": tokenizer.fingerprint,
        "seq_len": str(training.seq_len),
        "seed": str(seed),
        "order": ORDER,
    }
    if has_length:
        if len(data) == 0:
            raise DataError.at(KEY, f"'{path}' must hold samples, got none")
        fingerprint["samples"] = str(len(data))
        source = IndexedSamples(data, reader, num_samples=len(data), fingerprint=fingerprint)
        return Dataset([source], seed=seed, fingerprint=fingerprint, num_epochs=training.num_epochs)
    if held_out or training.num_epochs is not None:
        keys = (KEY,) if held_out else ("num_epochs", KEY)
        raise DataError.at(keys, f"needs data with __len__, and '{path}' has none")
    if not is_stream:
        return IndexedSamples(data, reader, num_samples=None, fingerprint=fingerprint)
    if training.dataloader.num_workers:
        rule = f"must be 0 for a stream such as '{path}', because each worker would read all of it"
        raise DataError.at(("dataloader.num_workers", KEY), rule)
    return CustomStream(data, reader, fingerprint)


def check_resume(make_stream: Callable[[], Any], *, num_samples: int = 8) -> None:
    """Check in a test that a custom stream resumes at its next sample after each of the first ones.

    Args:
        make_stream: Returns a new stream at its first sample.
        num_samples: Number of samples to compare.

    Raises:
        DataError: The stream repeats or skips a sample, or JSON changes its state.
    """

    def tokens_of(raw: Any) -> torch.Tensor:
        return _ids(raw["tokens"] if isinstance(raw, Mapping) else raw)

    expected = [tokens_of(raw) for raw in islice(make_stream(), num_samples)]
    stream = make_stream()
    for number, tokens in enumerate(expected):
        if number:
            state = _as_json(stream.state_dict(), name="the stream")
            stream = make_stream()
            stream.load_state_dict(state)
        if not torch.equal(tokens_of(next(iter(stream))), tokens):
            raise DataError(
                f"a stream must resume at its next sample, and does not after {number}; count "
                f"before each yield, so that the state names the next sample"
            )


def _as_json(state: dict[str, Any], *, name: str) -> dict[str, Any]:
    """Return a state after a round trip through JSON; raise DataError if that changes it."""
    try:
        copy: dict[str, Any] = json.loads(json.dumps(state))
    except (TypeError, ValueError) as error:
        raise DataError(f"the state of {name} must be JSON: {error}") from error
    if copy != state:
        raise DataError(f"JSON must not change the state of {name}: {state!r:.80}, {copy!r:.80}")
    return copy


class SampleReader:
    """Checks custom samples and converts them to tensors."""

    def __init__(self, path: str, training: TrainingConfig, *, vocab_size: int) -> None:
        self.path, self._vocab_size = path, vocab_size
        self._seq_len, self._has_lengths = training.seq_len, has_document_lengths(training)

    def read(self, raw: Any, *, number: int) -> Samples:
        """Return a sample of tensors; raise DataError if its form is wrong."""
        try:
            sample = self._as_tensors(raw)
        except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
            rule = f"{self._seq_len + 1} token ids, or tokens and labels of {self._seq_len} each"
            if self._has_lengths:
                rule += f", and document_lengths from 1 on that add up to {self._seq_len}"
            reason = f"{type(error).__name__}: {error}"
            raise DataError(f"sample {number} of '{self.path}' must be {rule}; {reason}") from error
        tokens, labels = sample["tokens"], sample["labels"]
        ids = torch.cat([tokens, labels[labels != IGNORED]])
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise DataError(
                f"sample {number} of '{self.path}' must have ids of the tokenizer, 0 to "
                f"{self._vocab_size - 1}, got {int(ids.min())} to {int(ids.max())}"
            )
        return sample

    def _as_tensors(self, raw: Any) -> Samples:
        if isinstance(raw, Mapping):
            sample = {key: _ids(raw[key]) for key in ("tokens", "labels")}
        else:
            row = _ids(raw)
            sample = {"tokens": row[:-1], "labels": row[1:]}
        shapes = {key: tuple(ids.shape) for key, ids in sample.items()}
        if {*shapes.values()} != {(self._seq_len,)}:
            raise ValueError(f"got shapes {shapes}")
        if self._has_lengths:
            lengths = sample["document_lengths"] = _ids(raw["document_lengths"])
            if lengths.sum() != self._seq_len or (lengths < 1).any():
                raise ValueError(f"got document_lengths {lengths.tolist()!s:.80}")
        return sample

    @contextmanager
    def as_data_error(self, number: int) -> Iterator[None]:
        """Turn any error of custom code into a DataError.

        SystemExit too, which would end a data worker, or the run, without a message.
        """
        try:
            yield
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            # a signal of the session reaches this process, not its workers
            if isinstance(error, KeyboardInterrupt) and get_worker_info() is None:
                raise
            raise DataError(
                f"'{self.path}' raised an error at sample {number}:\n{describe_error(error)}"
            ) from error


def _ids(raw: Any) -> torch.Tensor:
    ids = torch.as_tensor(raw)
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise TypeError(f"ids must be integers, not {ids.dtype}")
    return ids.to(torch.int64, copy=True)  # custom code may reuse the same memory


class IndexedSamples:
    """Samples by number: a source of known length, or all samples of a run, without an end."""

    stores = ()

    def __init__(
        self, data: Any, reader: SampleReader, *, num_samples: Any, fingerprint: dict[str, str]
    ) -> None:
        self._data, self._reader = data, reader
        self.num_samples, self.fingerprint = num_samples, fingerprint

    def __getitem__(self, i: int) -> Samples:
        with self._reader.as_data_error(i):
            raw = self._data[i]
        return self._reader.read(raw, number=i)


class CustomStream:
    """Samples in order. Samples between two requested ones are read and dropped."""

    num_samples: int | None = None
    stores = ()

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
            return self._state()

    def _state(self) -> dict[str, Any]:
        return _as_json(self._data.state_dict(), name=f"'{self._reader.path}'")

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
                raw = next(self._iterator, None)
            is_unchanged = self._loaded is not None and self._state() == self._loaded
            self._loaded = None
        if raw is None or is_unchanged:
            rule = "its state must change when samples are drawn" if is_unchanged else "no sample"
            raise DataError(
                f"'{self._reader.path}' at sample {self._next}: {rule}; see check_resume"
            )
        self._next += 1
        return raw
