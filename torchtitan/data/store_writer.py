"""Write a token store; `store.py` describes the format."""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from torchtitan.data.store import CHUNK, HEADER, MAGIC, TYPES, VERSION

MAX_SEQUENCE = 2**31 - 1


class StoreWriter:
    """Writes a store document by document. Built by `open_writer`.

    Tokens go straight to the file. The index takes 12 bytes of memory per document.
    """

    def __init__(self, file: BinaryIO, *, vocab_size: int) -> None:
        self._file = file
        self._code = 8 if vocab_size <= 2**16 else 4 if vocab_size <= 2**31 else 5
        self._dtype = np.dtype(TYPES[self._code])
        self._lengths, self._starts = array("i"), array("q", [0])
        self._open_length = 0
        self.num_tokens = 0

    @property
    def num_documents(self) -> int:
        """Return the number of documents ended so far."""
        return len(self._starts) - 1

    def add(self, ids: npt.NDArray[Any], *, ends_document: bool) -> None:
        """Append tokens to the current document, and end it if asked to."""
        assert ids.size == 0 or ids.max() <= np.iinfo(self._dtype).max, "id exceeds vocab_size"
        self._file.write(ids.astype(self._dtype).tobytes())
        self.num_tokens += len(ids)
        self._open_length += len(ids)
        while self._open_length > MAX_SEQUENCE:
            self._lengths.append(MAX_SEQUENCE)
            self._open_length -= MAX_SEQUENCE
        if ends_document:
            self._lengths.append(self._open_length)
            self._open_length = 0
            self._starts.append(len(self._lengths))

    def write_index(self, file: BinaryIO) -> None:
        """Write the index of all documents."""
        assert self._open_length == 0, "the last document was not ended"
        file.write(HEADER.pack(MAGIC, VERSION, self._code, len(self._lengths), len(self._starts)))
        lengths = np.array(self._lengths, "<i4")
        file.write(lengths.tobytes())
        start = 0
        for first in range(0, len(lengths), CHUNK):
            ends = start + np.cumsum(lengths[first : first + CHUNK], dtype="<i8")
            starts = np.concatenate([[start], ends[:-1]]) * self._dtype.itemsize
            file.write(starts.astype("<i8").tobytes())
            start = int(ends[-1])
        file.write(np.array(self._starts, "<i8").tobytes())


@contextmanager
def open_writer(prefix: str | Path, *, vocab_size: int) -> Iterator[StoreWriter]:
    """Yield a writer of the store `prefix`, which exists only after the context ends without error.

    Tokens are uint16 if `vocab_size` allows it, else int32, else int64.
    """
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    tokens, index = (Path(f"{prefix}{suffix}.tmp-{os.getpid()}") for suffix in (".bin", ".idx"))
    try:
        with tokens.open("wb") as file:
            writer = StoreWriter(file, vocab_size=vocab_size)
            yield writer
            _sync(file)
        with index.open("wb") as file:
            writer.write_index(file)
            _sync(file)
        # the index first: new tokens must never meet an old index
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        tokens.replace(f"{prefix}.bin")
        index.replace(f"{prefix}.idx")
    finally:
        tokens.unlink(missing_ok=True)
        index.unlink(missing_ok=True)


def _sync(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
