"""Tokens on disk, in the `.bin`/`.idx` format of Megatron-LM's indexed datasets.

Training reads tokens at random positions of a corpus that may be far larger than memory. So text is
tokenized once and the result is mapped into memory: the kernel loads the pages that are read, and
all ranks of a node share them. The format is Megatron's because other tools write and read it.

`PREFIX.bin` holds the tokens of all documents in order, little-endian. `PREFIX.idx` holds

    9 bytes   MMIDIDX\\0\\0
    uint64    version, 1
    uint8     type of a token: 1 uint8, 2 int8, 3 int16, 4 int32, 5 int64, 8 uint16
    uint64    number of sequences, n
    uint64    number of document boundaries, documents + 1
    int32[n]  tokens of each sequence
    int64[n]  start of each sequence in the .bin file, in bytes
    int64[.]  index of each document's first sequence, and n at the end

A document is usually one sequence. The writer cuts documents whose length int32 cannot hold.
"""

from __future__ import annotations

import hashlib
import os
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import DataError
from torchtitan.base.files import check_is_file
from torchtitan.data.text import check_fetched

STORE_SUFFIXES = (".idx", ".bin")
TEMPORARY = ".tmp-"
"""Begins the last suffix of a file that is being written."""
HEADER = struct.Struct("<9sQBQQ")
MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
CHUNK = 1 << 20
NUM_HASHED_CHUNKS = 64
MAX_SEQUENCE = 2**31 - 1


class TokenStore:
    """The tokens of documents, mapped from `PREFIX.bin` and `PREFIX.idx`.

    `prefix` is the path of both without suffix. `is_checked` skips the check of the index, which
    another process has done. Raises DataError if a file is missing, cut short, damaged or of
    another format.
    """

    def __init__(self, prefix: str | Path, *, is_checked: bool = False) -> None:
        self.prefix = str(prefix)
        index_file, token_file = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
        token_size = _size_of(token_file)
        dtype, num_sequences, num_boundaries = _read_header(index_file)
        if token_size == 0 or num_sequences == 0 or num_boundaries < 2:
            raise DataError(f"the token store {prefix} (.bin and .idx) holds no tokens")
        pointers_at = HEADER.size + 4 * num_sequences
        starts_at = pointers_at + 8 * num_sequences
        self.lengths = _map(index_file, "<i4", HEADER.size, num_sequences)
        self._pointers = _map(index_file, "<i8", pointers_at, num_sequences)
        self.document_starts = _map(index_file, "<i8", starts_at, num_boundaries)
        if not is_checked:
            size = self._check_index(index_file, item_size=dtype.itemsize)
            if size != token_size:
                raise DataError(f"{token_file} must be {size} bytes by its index, got {token_size}")
        self.tokens: npt.NDArray[Any] = _map(token_file, dtype, 0, token_size // dtype.itemsize)

    def __reduce__(self) -> tuple[Callable[[str], TokenStore], tuple[str]]:
        # a worker process maps the files again
        return partial(TokenStore, is_checked=True), (self.prefix,)

    def _check_index(self, file: Path, *, item_size: int) -> int:
        """Return the size of all sequences in bytes.

        Raises DataError unless each sequence starts at the end of the previous one, and the
        documents divide the sequences in order: training reads the tokens as one row, so it would
        train on the content of a gap.
        """
        end, starts = 0, self.document_starts
        is_valid = starts[0] == 0 and starts[-1] == len(self.lengths)
        for first in range(0, len(self.lengths), CHUNK):
            lengths = self.lengths[first : first + CHUNK]
            ends = end + np.cumsum(lengths, dtype=np.int64) * item_size
            pointers = self._pointers[first : first + CHUNK]
            expected = np.concatenate([[end], ends[:-1]])
            is_valid &= bool((lengths >= 0).all() and (pointers == expected).all())
            end = int(ends[-1])
        for first in range(0, len(starts), CHUNK):
            part = starts[first : first + CHUNK + 1]  # one more, to compare the last one with
            is_valid &= bool((part[1:] >= part[:-1]).all())
        if not is_valid:
            raise DataError(f"{file} is damaged: its sequences or documents overlap or leave gaps")
        return end

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens of all documents."""
        return len(self.tokens)

    @property
    def num_documents(self) -> int:
        """Return the number of documents."""
        return len(self.document_starts) - 1

    def document(self, number: int) -> npt.NDArray[Any]:
        """Return the tokens of one document, mapped, in their stored type."""
        return self.tokens[self.first_token(number) : self.first_token(number + 1)]

    def first_token(self, document: int) -> int:
        """Return the start of a document; after the last document, the number of tokens."""
        sequence = int(self.document_starts[document])
        if sequence == len(self._pointers):
            return self.num_tokens  # documents without a sequence, at the end
        return int(self._pointers[sequence]) // self.tokens.dtype.itemsize

    def boundaries(self, first: int, stop: int) -> list[int]:
        """Return the tokens after `first` and before `stop` that start a document.

        A binary search reads only a few entries of the index. Empty documents have no boundary.
        """
        number = bisect_right(range(self.num_documents), first, key=self.first_token)
        starts: list[int] = []
        while number < self.num_documents and (start := self.first_token(number)) < stop:
            if not starts or start != starts[-1]:
                starts.append(start)
            number += 1
        return starts

    def content_hash(self) -> str:
        """Return a SHA-256 of both files, independent of their path and age."""
        return hash_files([Path(self.prefix + suffix) for suffix in STORE_SUFFIXES])


def hash_files(files: Sequence[Path]) -> str:
    """Return a SHA-256 of files: of their size, and of up to 64 chunks of 1 MiB, evenly spread."""
    digest = hashlib.sha256()
    for file in files:
        size = _size_of(file)
        digest.update(struct.pack("<Q", size))
        with file.open("rb") as handle:
            for offset in _hashed_offsets(size):
                handle.seek(offset)
                digest.update(handle.read(CHUNK))
    return digest.hexdigest()


def _size_of(file: Path) -> int:
    try:
        check_is_file(file)
        return file.stat().st_size
    except OSError as error:
        raise DataError(f"a token store needs .bin and .idx: {file}: {error.strerror}") from error


def _read_header(file: Path) -> tuple[np.dtype[Any], int, int]:
    """Return the type of tokens, the number of sequences, and of document boundaries."""
    size = _size_of(file)
    with file.open("rb") as handle:
        header = handle.read(HEADER.size)
    check_fetched(file, header)
    if len(header) == HEADER.size:
        magic, version, code, num_sequences, num_boundaries = HEADER.unpack(header)
        expected = HEADER.size + 12 * num_sequences + 8 * num_boundaries
        # multimodal stores append one byte per sequence
        has_size = size in (expected, expected + num_sequences)
        if (magic, version) == (MAGIC, VERSION) and code in TYPES and has_size:
            return np.dtype(TYPES[code]), num_sequences, num_boundaries
    raise DataError(
        f"{file} must be an index in Megatron's format (version {VERSION}, tokens of type "
        f"{list(TYPES)}); it is another file or damaged"
    )


def _map(file: Path, dtype: Any, offset: int, count: int) -> npt.NDArray[Any]:
    # a plain array: slicing an np.memmap is several times slower
    return np.asarray(np.memmap(file, dtype, mode="r", offset=offset, shape=(count,)))


def _hashed_offsets(size: int) -> Iterable[int]:
    if size <= NUM_HASHED_CHUNKS * CHUNK:
        return range(0, size, CHUNK)
    return (i * (size - CHUNK) // (NUM_HASHED_CHUNKS - 1) for i in range(NUM_HASHED_CHUNKS))


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
    """Yield a writer of the store `prefix`, which replaces an earlier one if no error is raised.

    Tokens are uint16 if `vocab_size` allows it, else int32, else int64. Without documents there is
    no store afterwards.
    """
    Path(prefix).parent.mkdir(parents=True, exist_ok=True)
    writer_id = f"{os.uname().nodename}-{os.getpid()}"
    index, tokens = (Path(f"{prefix}{suffix}{TEMPORARY}{writer_id}") for suffix in STORE_SUFFIXES)
    try:
        with tokens.open("wb") as file:
            writer = StoreWriter(file, vocab_size=vocab_size)
            yield writer
            file.flush()
            os.fsync(file.fileno())
        with index.open("wb") as file:
            writer.write_index(file)
            file.flush()
            os.fsync(file.fileno())
        # the index first: new tokens must never meet an old index
        Path(f"{prefix}.idx").unlink(missing_ok=True)
        Path(f"{prefix}.bin").unlink(missing_ok=True)
        if writer.num_documents:
            tokens.replace(f"{prefix}.bin")
            index.replace(f"{prefix}.idx")
    finally:
        tokens.unlink(missing_ok=True)
        index.unlink(missing_ok=True)
