"""Checksums: files are hashed while they are written and compared before they are loaded.

A disk, a network file system or a copying tool can change a byte without an error, and training
would continue with a wrong weight. So the size and digest of each file are taken from the bytes on
their way to the disk, not read back, and are listed in the manifest, which ends with a digest of
itself.

The digest is XXH3 (128 bits). It detects accidents, not forgery: a forger could write a new
manifest too. SHA-256 and CRC-32 of the standard library take as long as reading does; XXH3 runs at
memory speed.
"""

from __future__ import annotations

import io
import json
import os
import re
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import heapreplace
from pathlib import Path
from stat import S_ISREG
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.mesh.ranks import on_every_rank, on_first_rank

MANIFEST = "manifest.json"
_CHUNK = 1 << 20  # hashed while still in the processor's cache
_SEALED = re.compile(rb'(\{.*,\n) "checksum": "([0-9a-f]{32})"\n\}\n', re.DOTALL)


@dataclass(frozen=True)
class FileRecord:
    """Size in bytes and digest of a file."""

    size: int
    digest: str


class HashingFile(io.BufferedWriter):
    """A new file that hashes what is written to it and syncs when it is closed."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._hash = xxhash.xxh3_128()
        self._size = 0

    def write(self, data: Any) -> int:
        """Write and hash bytes."""
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        return super().write(data)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Refuse: hashed bytes cannot be overwritten."""
        raise io.UnsupportedOperation("a HashingFile is written from front to back")

    def close(self) -> None:
        """Sync the file to disk and close it."""
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def record(self) -> FileRecord:
        """Size and digest of the bytes written so far."""
        return FileRecord(self._size, self._hash.hexdigest())


class HashingFileSystem(FileSystem):
    """File system of a DCP writer. `records` maps the name of each written file to its record."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; a written one is synced and recorded when it is closed."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashingFile(Path(path)) as file:  # closing it raises the error of a full disk again
            yield file
        self.records[Path(path).name] = file.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Rename a file and its record."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


def hash_file(path: Path) -> str:
    """Return the digest of a file."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))  # reused, so that the system hands out no new pages
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write and sync a file; return its record."""
    with HashingFile(path) as file:
        file.write(content)
    return file.record


def write_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Write a JSON object; return the record of the file."""
    return write_bytes(path, json.dumps(content, indent=1).encode())


def seal(content: Mapping[str, Any]) -> bytes:
    """Return a JSON object whose last line is the digest of the lines before it."""
    lines = json.dumps(content, indent=1).encode().removesuffix(b"\n}") + b",\n"
    return lines + f' "checksum": "{xxhash.xxh3_128(lines).hexdigest()}"\n}}\n'.encode()


def is_sealed(content: bytes) -> bool:
    """Return whether `content` is a complete and unchanged result of `seal`."""
    match = _SEALED.fullmatch(content)
    return match is not None and xxhash.xxh3_128(match[1]).hexdigest() == match[2].decode()


def list_files(manifest: StoredJSON) -> dict[str, FileRecord]:
    """Return the files of a checkpoint by name, from its manifest.

    Raises:
        CheckpointError: An entry is not the size and digest of a file inside the folder.
    """
    manifest.check_types({"files": dict})
    results = {}
    for name, entry in manifest["files"].items():
        about: dict[str, Any] = entry if isinstance(entry, dict) else {}
        size, digest, parts = about.get("size", -1), about.get("xxh3_128", 0), name.split("/")
        is_record = type(size) is int and size >= 0 and isinstance(digest, str)
        is_inside = all(parts) and not {".", ".."} & {*parts} and name.isprintable()
        if not (is_record and is_inside) or name == MANIFEST:
            raise CheckpointError(
                f"{manifest.path} must list files inside its folder with size and checksum, got "
                f"{name!r:.80}: {str(entry)[:60]!r}; use another checkpoint"
            )
        results[name] = FileRecord(size, digest)
    return results


def verify(checkpoint: Path, *, group: dist.ProcessGroup | None) -> list[str]:
    """Compare a checkpoint's files with its manifest; return the mistakes, the same on every rank.

    The ranks share the files and exchange the results. Other files in the folder are never read.

    Args:
        checkpoint: Folder of one checkpoint.
        group: Ranks that share the work. None: this process only.
    """
    mistakes, to_hash = on_first_rank(lambda: _stored_files(checkpoint), group=group)
    rank, num_ranks = (
        (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    )
    mine = share_files(to_hash, rank=rank, num_ranks=num_ranks)
    results = on_every_rank(lambda: find_damage(checkpoint, mine), group=group)
    return sorted([*mistakes, *(mistake for part in results for mistake in part)])


def summarize(mistakes: list[str]) -> str:
    """Join mistakes into one line, at most five of them."""
    suffix = f"; and {len(mistakes) - 5} more" if len(mistakes) > 5 else ""
    return "; ".join(mistakes[:5]) + suffix


def _stored_files(checkpoint: Path) -> tuple[list[str], dict[str, FileRecord]]:
    """Return the mistakes of the manifest, and the files that it lists."""
    path = checkpoint / MANIFEST
    try:
        if not path.is_file():
            return [f"{MANIFEST} is missing"], {}
        if not is_sealed(path.read_bytes()):
            return [f"{MANIFEST} is damaged: its checksum differs"], {}
        return [], list_files(read_json(path))
    except OSError as error:  # a bad disk or missing permissions: an older step may be readable
        return [f"it cannot be read: {error}"], {}
    except CheckpointError as error:
        return [str(error)], {}


def share_files(
    files: Mapping[str, FileRecord], *, rank: int, num_ranks: int
) -> dict[str, FileRecord]:
    """Return this rank's share of the files; all shares have about the same number of bytes."""
    loads = [(0, rank) for rank in range(num_ranks)]
    mine = {}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        load, taker = loads[0]
        heapreplace(loads, (load + files[name].size, taker))
        if taker == rank:
            mine[name] = files[name]
    return mine


def find_damage(folder: Path, files: Mapping[str, FileRecord], *, hashes: bool = True) -> list[str]:
    """Return a mistake for each file that is missing or differs from its record.

    Args:
        folder: Folder of the files.
        files: Records by name.
        hashes: Whether to compare digests too, not only sizes.
    """
    mistakes = []
    for name, record in files.items():
        path = folder / name
        try:
            about = path.stat()
            if not S_ISREG(about.st_mode):  # opening a pipe blocks
                mistakes.append(f"{name} is missing")
            elif about.st_size != record.size:
                mistakes.append(f"{name} has {about.st_size} bytes, not {record.size}")
            elif hashes and hash_file(path) != record.digest:
                mistakes.append(f"{name} is damaged: its checksum differs")
        except FileNotFoundError:
            mistakes.append(f"{name} is missing")
        except OSError as error:
            mistakes.append(f"{name} cannot be read: {error}")
    return mistakes
