"""The bytes of a data file: opened, unpacked while they are read, and given out in blocks.

A packed file of a few KiB can hold terabytes of one letter. So files are unpacked a little at a
time, and a file that grows as no text does is an error.
"""

from __future__ import annotations

import codecs
import gzip
import io
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePath
from typing import BinaryIO

from torchtitan.base.errors import DataError
from torchtitan.data.text import check_fetched

BLOCK_BYTES = 1 << 20
# text is packed to a fifth, one letter by gzip to a thousandth; 4 bytes of zstd may hold 128 KiB
MAX_GROWTH, FREE_BYTES = 400, 1 << 26
PACKED_BYTES = 1 << 10
HEAD_BYTES = 4096

Advance = Callable[[int], None]


class Part:
    """What is read as one file: `name` is for messages, `path` where it lies on disk.

    `advance` is called with each number of bytes of the file on disk that were read.
    """

    def __init__(self, path: Path, raw: BinaryIO, *, advance: Advance) -> None:
        self.path, self.name = path, path
        self._raw, self._advance, self._reached = raw, advance, 0
        self._stream = _unpacked(raw, path)

    @property
    def is_packed(self) -> bool:
        """Return whether its bytes on disk are others."""
        return self._stream is not self._raw

    def blocks(self) -> Iterator[bytes]:
        """Yield the unpacked contents in blocks of 1 MiB; the last one may be smaller."""
        while block := self._read(BLOCK_BYTES):
            self.reach(self._raw.tell())
            yield block

    def head(self) -> bytes:
        """Return the first bytes, unpacked."""
        return self._read(HEAD_BYTES)

    def _read(self, size: int) -> bytes:
        with readable(self.path):
            return self._stream.read(size)

    def reach(self, offset: int) -> None:
        """Report that the file on disk is read up to here."""
        self._advance(offset - self._reached)
        self._reached = offset

    def decode(self, data: bytes, *, offset: int, final: bool, place: str = "") -> tuple[str, int]:
        """Return the text of `data` and how many bytes were used: a cut last character is left.

        A byte order mark at the beginning is left out.
        """
        try:
            text, used = codecs.utf_8_decode(data, "strict", final)
        except UnicodeDecodeError as error:
            unpacked = " of the unpacked text" if self.is_packed else ""
            raise DataError(
                f"text must be UTF-8: {self.name}{place} has an invalid byte "
                f"0x{data[error.start]:02x} at byte offset {offset + error.start}{unpacked}; "
                f"convert the file, for example with iconv"
            ) from error
        return (text[1:] if offset == 0 and text.startswith("\ufeff") else text), used


def open_parts(file: Path, *, advance: Advance = lambda num_bytes: None) -> Iterator[Part]:
    """Yield what there is to read in a file; raise DataError if it cannot be read."""
    with readable(file), file.open("rb") as raw:
        check_fetched(file, raw.read(HEAD_BYTES))
        raw.seek(0)
        yield Part(file, raw, advance=advance)


@contextmanager
def readable(file: PurePath) -> Iterator[None]:
    """Turn what libraries raise on a file that is missing or damaged into a DataError."""
    try:
        yield
    except OSError as error:
        # a damaged .gz is an OSError without an error number
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    except (EOFError, zlib.error) as error:
        raise DataError(f"cannot read {file}: it is cut short or damaged ({error})") from error


class _Stream(io.RawIOBase):
    """Blocks of any size as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._ready = blocks, memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._ready = self._ready or memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        return size


def _unpacked(raw: BinaryIO, name: PurePath) -> BinaryIO:
    unpack = UNPACKERS.get(name.suffix.lower())
    if unpack is None:
        return raw
    return io.BufferedReader(_Stream(_guarded(unpack(raw), raw, name)), BLOCK_BYTES)


def _guarded(blocks: Iterator[bytes], raw: BinaryIO, name: PurePath) -> Iterator[bytes]:
    """Yield the blocks; raise DataError if they grow as no text does."""
    num_unpacked = 0
    for block in blocks:
        num_unpacked += len(block)
        done = raw.tell()
        if num_unpacked > FREE_BYTES + MAX_GROWTH * done:
            raise DataError(
                f"{name} unpacks to over {MAX_GROWTH} times its size, as text does not: its first "
                f"{done / 1e6:.1f} MB gave {num_unpacked / 1e6:.0f} MB; look at what is in it, and "
                f"unpack it yourself if you want it read"
            )
        yield block


def _unpack_gz(raw: BinaryIO) -> Iterator[bytes]:
    return iter(partial(gzip.GzipFile(fileobj=raw).read, BLOCK_BYTES), b"")


def _unpack_zst(raw: BinaryIO) -> Iterator[bytes]:
    """Yield what each KiB unpacks to, at most 32 MiB at once."""
    import zstandard

    # not stream_reader: it reads a file that was cut short without an error
    unpacker = zstandard.ZstdDecompressor(max_window_size=2**31)
    frame = None
    while packed := raw.read(PACKED_BYTES):
        while packed:
            frame = frame or unpacker.decompressobj()
            try:
                block = frame.decompress(packed)
            except zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            packed = frame.unused_data if frame.eof else b""
            frame = None if frame.eof else frame
            if block:
                yield block
    if frame is not None:
        raise EOFError("the last zstd frame has no end")


UNPACKERS: Mapping[str, Callable[[BinaryIO], Iterator[bytes]]] = {
    ".gz": _unpack_gz,
    ".zst": _unpack_zst,
}
"""How a packed file is unpacked, by the suffix that follows that of its contents."""
