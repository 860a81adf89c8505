"""The bytes of a data file: unpacked while they are read, and given out as text.

A packed file of a few KiB can hold terabytes of one letter. So files are unpacked a little at a
time. A file that grows as no text does is an error, and so is a line too long to be held.
"""

from __future__ import annotations

import codecs
import gzip
import io
import lzma
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from io import BufferedReader
from itertools import count
from pathlib import Path, PurePath
from typing import Any, TypeAlias

from torchtitan.base.errors import DataError

BLOCK_BYTES = 1 << 20
MAX_LINE_BYTES = 1 << 28
# text is packed to a fifth, one letter by gzip to a thousandth; 4 bytes of zstd may hold 128 KiB
MAX_GROWTH, FREE_BYTES = 400, 1 << 26
PACKED_BYTES = 1 << 10
HEAD_BYTES = 4096
TAR_BLOCK = 512

Stream: TypeAlias = "BufferedReader[Any]"
Advance = Callable[[int], None]
Members = Iterator[tuple[str, Stream]]
DAMAGED = (EOFError, zlib.error, lzma.LZMAError, zipfile.BadZipFile, tarfile.TarError)


class Counted(io.FileIO):
    """A file that calls `advance` with each number of bytes that were read."""

    def __init__(self, file: Path, advance: Advance) -> None:
        super().__init__(file)
        self.advance = advance

    def readinto(self, buffer: Any) -> int:
        """Fill a buffer; return how far."""
        size = super().readinto(buffer) or 0
        self.advance(size)
        return size

    def read(self, size: int | None = -1) -> bytes:
        """Return the next bytes."""
        data = super().read(size) or b""
        self.advance(len(data))
        return data


@dataclass(frozen=True)
class Part:
    """What is read as one file: a file, or a member of an archive."""

    name: PurePath
    """The path of the file, and in an archive behind it that of the member."""
    stream: Stream
    """The contents, unpacked."""
    is_packed: bool

    def head(self) -> bytes:
        """Return the first bytes, if nothing was read yet."""
        with readable(self.name):
            return self.stream.peek(HEAD_BYTES)[:HEAD_BYTES]

    def texts(self) -> Iterator[str]:
        """Yield the text in parts of about 1 MiB."""
        data, offset = b"", 0
        with readable(self.name):
            while True:
                block = self.stream.read(BLOCK_BYTES)
                data += block
                # the last character of a block may be cut
                text, used = self._decode(data, offset=offset, final=not block)
                data, offset = data[used:], offset + used
                if not block:
                    return
                yield text

    def lines(self) -> Iterator[tuple[int, str]]:
        """Yield number and text of each line, with its end."""
        offset = 0
        with readable(self.name):
            for number in count(1):
                line = self.stream.readline(MAX_LINE_BYTES + 1)
                if len(line) > MAX_LINE_BYTES:
                    raise self._too_long(line[:HEAD_BYTES])
                if not line:
                    return
                text, _ = self._decode(line, offset=offset, final=True, place=f" line {number}")
                offset += len(line)
                yield number, text

    def _too_long(self, head: bytes) -> DataError:
        start = head.decode(errors="replace").lstrip("\ufeff \t\r")
        is_array = start.startswith("[")
        return DataError(
            f"a line of {self.name} is longer than {MAX_LINE_BYTES >> 20} MiB, beginning with "
            f"{start[:40]!r}; "
            f"{'give an array the suffix .json' if is_array else 'cut it into documents'}"
        )

    def _decode(self, data: bytes, *, offset: int, final: bool, place: str = "") -> tuple[str, int]:
        """Return the text of `data`, without a byte order mark, and how many bytes were used."""
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


@contextmanager
def readable(file: PurePath) -> Iterator[None]:
    """Turn what libraries raise on a file that is missing or damaged into a DataError."""
    try:
        yield
    except OSError as error:
        # a damaged .gz is an OSError without an error number
        raise DataError(f"cannot read {file}: {error.strerror or error}") from error
    except DAMAGED as error:
        raise DataError(f"cannot read {file}: it is cut short or damaged ({error})") from error
    except NotImplementedError as error:
        raise DataError(f"cannot read {file}: {error}; unpack it, or pack it anew") from error


class _Stream(io.RawIOBase):
    """Blocks of any size as a file."""

    def __init__(self, blocks: Iterator[bytes]) -> None:
        self._blocks, self._ready, self._at = blocks, memoryview(b""), 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        self._ready = self._ready or memoryview(next(self._blocks, b""))
        size = min(len(buffer), len(self._ready))
        buffer[:size], self._ready = self._ready[:size], self._ready[size:]
        self._at += size
        return size

    def tell(self) -> int:
        return self._at


def unpacked(raw: Stream, file: PurePath) -> Stream:
    """Return the contents of a file that is packed, by its name, or else the file itself."""
    unpack = UNPACKERS.get(file.suffix.lower())
    return raw if unpack is None else _guarded(unpack(raw), file, num_read=raw.tell)


def _guarded(blocks: Iterator[bytes], file: PurePath, *, num_read: Callable[[], int]) -> Stream:
    """Return the blocks as a file; reading more than text can grow to raises DataError."""

    def guarded() -> Iterator[bytes]:
        num_unpacked = 0
        for block in blocks:
            num_unpacked += len(block)
            if num_unpacked > FREE_BYTES + MAX_GROWTH * num_read():
                raise DataError(
                    f"{file} unpacks to over {MAX_GROWTH} times its size, as text does not: its "
                    f"first {num_read() / 1e6:.1f} MB gave {num_unpacked / 1e6:.0f} MB; look at "
                    f"what is in it, and unpack it yourself if you want it read"
                )
            yield block

    return BufferedReader(_Stream(guarded()), BLOCK_BYTES)


def _unpack_gz(raw: Stream) -> Iterator[bytes]:
    return iter(partial(gzip.GzipFile(fileobj=raw).read, BLOCK_BYTES), b"")


def _unpack_zst(raw: Stream) -> Iterator[bytes]:
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


UNPACKERS: Mapping[str, Callable[[Stream], Iterator[bytes]]] = {
    ".gz": _unpack_gz,
    ".tgz": _unpack_gz,
    ".zst": _unpack_zst,
}


def zip_members(raw: Stream, file: PurePath) -> Members:
    """Yield the files in a zip archive, in its order."""
    with zipfile.ZipFile(raw) as archive:
        for info in archive.infolist():
            if info.is_dir() or _is_of_macos(info.filename):
                continue
            if info.flag_bits & 1:
                raise DataError(f"{file / info.filename} is encrypted; unpack the archive")
            if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                # zipfile unpacks a block of another kind whole, whatever its size
                raise DataError(
                    f"{file / info.filename} is packed in another way than deflate; pack it anew"
                )
            with archive.open(info) as member:
                blocks = iter(partial(member.read, BLOCK_BYTES), b"")
                size = info.compress_size
                yield info.filename, _guarded(blocks, file, num_read=partial(int, size))


def tar_members(raw: Stream, file: PurePath) -> Members:
    """Yield the files in a tar archive, in its order."""
    stream = _Tail(raw)
    with tarfile.open(fileobj=stream, mode="r|") as archive:  # type: ignore[call-overload]
        for info in archive:
            if info.isdir() or _is_of_macos(info.name):
                continue
            member = archive.extractfile(info) if info.isfile() else None
            if member is None:
                raise DataError(f"{file / info.name} is a link or a device; unpack the archive")
            yield info.name, member  # type: ignore[misc]
    while stream.read(BLOCK_BYTES):
        continue
    # tarfile takes an archive that is cut off after a member for a whole one
    if stream.last.strip(b"\0") or len(stream.last) < TAR_BLOCK:
        raise EOFError("the archive has no end")


def _is_of_macos(member: str) -> bool:
    """Tell whether macOS added the member by itself, as a note about others."""
    path = PurePath(member)
    return "__MACOSX" in path.parts or path.name.startswith("._") or path.name == ".DS_Store"


class _Tail:
    """A file that keeps the last bytes read."""

    def __init__(self, raw: Stream) -> None:
        self._raw, self.last = raw, b""

    def read(self, size: int) -> bytes:
        data = self._raw.read(size)
        self.last = (self.last + data)[-TAR_BLOCK:]
        return data
