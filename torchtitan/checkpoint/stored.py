"""Read a tensor of torch.save from its file directly into its destination.

torch.load reads a tensor into new memory, from which it is then copied. The system allocates that
memory page by page, clears it, and frees it again: for a large tensor this costs more than reading
it. So torch.load is asked only for type and shape (on the meta device), and the bytes are read into
the destination, only the needed rows.

This requires that the bytes in the file are those in memory: one uncompressed zip record in this
machine's byte order, as torch.save writes a contiguous tensor. Other tensors, and small ones, are
read by torch.load. An archive with compressed records is refused: torch.save never compresses, a
few bytes could expand to gigabytes, and torch.load(mmap=True) would take the compressed bytes for
weights.
"""

from __future__ import annotations

import errno
import io
import os
import struct
import sys
from typing import IO, Any, TypeAlias, cast
from zipfile import ZIP_STORED, BadZipFile, ZipFile, ZipInfo

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo

from torchtitan.base.errors import CheckpointError

Place: TypeAlias = _StorageInfo
"""File, offset and length of a piece."""
LARGE = 1 << 20
"""Number of bytes from which allocating memory costs more than parsing the zip."""
_HEADER = struct.Struct("<4s22xHH")
"""Local header of a zip record: signature, length of the name, length of the extra field."""


class StoredPiece:
    """A tensor that torch.save wrote as `length` bytes at `offset` of a file."""

    def __init__(self, file: io.BufferedReader, *, offset: int, length: int) -> None:
        self._window = _Window(file, offset, length)
        self._begin: int | None = None
        """Offset of the elements in the window; None if `content` has them."""
        self.content: Any = None
        """The loaded object: a tensor, possibly on the meta device, unless the file is damaged."""
        records = read_records(cast(IO[bytes], self._window))
        record = _find_elements(records, self._window) if length >= LARGE else None
        if record is not None:
            self._begin, num_bytes = record
            self.content = self._load("meta")
        if record is None or not lies_as_in_memory(self.content, num_bytes):
            self._begin = None
            self.content = self._load("cpu")

    def _load(self, device: str) -> Any:
        self._window.seek(0)
        return torch.load(self._window, map_location=device, weights_only=True)

    def read(self, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of the tensor into `into`, converted to its type."""
        part: Tensor = self.content[region]
        if self._begin is None:
            into.copy_(part)
            return
        # elements from the first to the last of the region
        steps = zip(part.shape, part.stride(), strict=True)
        num_elements = 1 + sum((n - 1) * stride for n, stride in steps) if part.numel() else 0
        is_direct = (
            type(into) is Tensor
            and (into.device.type, into.dtype) == ("cpu", part.dtype)
            and into.is_contiguous()
            and part.is_contiguous()
        )
        there = (
            into.as_strided((num_elements,), (1,))
            if is_direct
            else torch.empty(num_elements, dtype=part.dtype)
        )
        self._window.seek(self._begin + part.storage_offset() * part.element_size())
        elements = memoryview(there.view(torch.uint8).numpy())
        if self._window.readinto(elements) < len(elements):
            raise CheckpointError("it is cut short")
        if not is_direct:
            into.copy_(there.as_strided(part.shape, part.stride()))


def lies_as_in_memory(content: Any, num_bytes: int) -> bool:
    """Return whether `num_bytes` are exactly the elements of a contiguous tensor."""
    return (
        type(content) is Tensor
        and content.layout == torch.strided
        and content.is_contiguous()
        and not (content.storage_offset() or content.is_conj() or content.is_neg())
        and content.nbytes == num_bytes
    )


def read_records(file: IO[bytes]) -> list[ZipInfo]:
    """Return the records of a zip archive of torch.save; [] if the file is not an archive.

    Raises:
        CheckpointError: A record is compressed, or the archive is damaged.
    """
    file.seek(0)
    if file.read(4) != b"PK\3\4":  # torch.load's own test
        return []
    try:
        with ZipFile(file) as archive:
            records = archive.infolist()
            if archive.comment or min((one.header_offset for one in records), default=0):
                raise BadZipFile("it has bytes outside its records")
    except (BadZipFile, NotImplementedError) as error:
        # torch's reader is less strict: it might find other records and decompress them
        raise CheckpointError(f"its archive is damaged: {error}") from error
    packed = [record.filename for record in records if record.compress_type != ZIP_STORED]
    if packed:
        raise CheckpointError(
            f"its record {packed[0]!r:.80} is compressed, which torch.save never does: save it "
            f"again with torch.save, or zip it without compression (zip -0)"
        )
    return records


def parse_archive(archive: bytes) -> tuple[list[ZipInfo], tuple[int, int] | None]:
    """Return the records of an archive, and offset and size of its elements as `StoredPiece` does.

    Raises:
        CheckpointError: A record is compressed, or the archive is damaged.
    """
    window = _Window(io.BytesIO(archive), 0, len(archive))
    records = read_records(cast(IO[bytes], window))
    return records, _find_elements(records, window)


def _find_elements(records: list[ZipInfo], window: _Window) -> tuple[int, int] | None:
    """Return offset and size of the archive's only storage; None if it has several, or another byte
    order."""
    orders = [record for record in records if record.filename.endswith("/byteorder")]
    storages = [record for record in records if "/data/" in record.filename]
    if (len(orders), len(storages)) != (1, 1):
        return None
    order, storage = _place(orders[0], window), _place(storages[0], window)
    if order is None or storage is None:
        return None
    window.seek(order[0])
    return storage if window.read(order[1]) == sys.byteorder.encode() else None


def _place(record: ZipInfo, window: _Window) -> tuple[int, int] | None:
    """Return offset and size of a record's bytes; None if its header is damaged."""
    window.seek(record.header_offset)
    header = window.read(_HEADER.size)
    if len(header) < _HEADER.size:
        return None
    signature, *behind = _HEADER.unpack(header)
    begin = record.header_offset + _HEADER.size + sum(behind)
    # a size beyond the file would be allocated
    is_whole = signature == b"PK\3\4" and begin + record.file_size <= window.length
    return (begin, record.file_size) if is_whole else None


class _Window(io.RawIOBase):
    """A part of a file as a file object."""

    def __init__(self, file: io.BufferedIOBase, offset: int, length: int) -> None:
        self._file = file
        self._offset = offset
        self.length = length
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.length}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, f"cannot seek to byte {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        """Read up to the end of the window into `buffer`."""
        view = memoryview(buffer).cast("B")[: max(0, self.length - self._at)]
        self._file.seek(self._offset + self._at)
        count = self._file.readinto(view)
        self._at += count
        return count
