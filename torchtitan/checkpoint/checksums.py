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
from pathlib import Path
from typing import Any

import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, check_is_file, parse_json
from torchtitan.mesh.ranks import on_every_rank, on_first_rank

MANIFEST = "manifest.json"
_TYPES = {"step": int, "components": list, "layout": dict, "config": str, "files": dict}
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


def write_bytes(path: Path, content: bytes) -> FileRecord:
    """Write and sync a file; return its record."""
    with HashingFile(path) as file:
        file.write(content)
    return file.record


def write_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Write a JSON object; return the record of the file."""
    return write_bytes(path, json.dumps(content, indent=1).encode())


def hash_file(path: Path) -> str:
    """Return the digest of a file."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))  # reused, so that the system hands out no new pages
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


# -- manifest ------------------------------------------------------------------------------------


def seal(content: Mapping[str, Any]) -> bytes:
    """Return a JSON object whose last line is the digest of the lines before it."""
    lines = json.dumps(content, indent=1).encode().removesuffix(b"\n}") + b",\n"
    return lines + f' "checksum": "{xxhash.xxh3_128(lines).hexdigest()}"\n}}\n'.encode()


def parse_manifest(content: bytes, *, path: Path) -> StoredJSON:
    """Return the manifest of a checkpoint, which was read from `path`; raise CheckpointError if it
    is incomplete or damaged."""
    match = _SEALED.fullmatch(content)
    if match is None or xxhash.xxh3_128(match[1]).hexdigest() != match[2].decode():
        raise CheckpointError(f"{path} is damaged: its checksum differs")
    return parse_json(content, path=path).check_types(_TYPES)


def read_manifest(checkpoint: Path) -> StoredJSON:
    """Return the manifest of a checkpoint; raise CheckpointError if the file is missing or
    damaged."""
    path = checkpoint / MANIFEST
    try:
        check_is_file(path)
        return parse_manifest(path.read_bytes(), path=path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def find_manifest(checkpoint: Path) -> StoredJSON | None:
    """Return the manifest of a checkpoint, None if it is missing or damaged."""
    try:
        return read_manifest(checkpoint)
    except CheckpointError:
        return None


def list_files(manifest: StoredJSON) -> dict[str, FileRecord]:
    """Return the files of a checkpoint by name; raise CheckpointError if an entry is not the size
    and digest of a file inside the folder."""
    records = {}
    try:
        for name, entry in manifest["files"].items():
            if {"", ".", ".."} & {*name.split("/")} or not name.isprintable() or name == MANIFEST:
                raise ValueError(f"{name!r:.80} is not a file inside the folder")
            size, digest = entry["size"], entry["xxh3_128"]
            if type(size) is not int or size < 0 or not isinstance(digest, str):
                raise ValueError(f"{name!r:.80} must have a size and a digest")
            records[name] = FileRecord(size, digest)
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{manifest.path} is damaged: files: {error}") from error
    return records


# -- verification --------------------------------------------------------------------------------


def verify(
    checkpoint: Path,
    *,
    group: dist.ProcessGroup | None,
    disk: tuple[int, ...] | None = None,
    hashes: bool = True,
) -> list[str]:
    """Compare a checkpoint's files with its manifest; return the mistakes, the same on every rank.

    The ranks share the files and exchange the results. Other files in the folder are never read.

    `group` shares the work; None: this process only. `disk` has the ranks that share this rank's
    disk, if a disk may have only the files that its ranks wrote. Without `hashes` only sizes are
    compared.
    """

    def read() -> dict[str, FileRecord] | str:
        try:
            return list_files(read_manifest(checkpoint))
        except CheckpointError as error:
            return str(error)

    files = on_first_rank(read, group=group)
    if isinstance(files, str):
        return [files]
    rank, ranks = (0, [0]) if group is None else (group.rank(), disk or range(group.size()))
    present = files
    if disk is not None:
        present = {name: r for name, r in files.items() if (checkpoint / name).is_file()}
    mine = share_files(present, rank=ranks.index(rank), num_ranks=len(ranks))
    results = on_every_rank(
        lambda: ([*mine], find_damage(checkpoint, mine, hashes=hashes)), group=group
    )
    missing = files.keys() - {name for names, _ in results for name in names}
    mistakes = {mistake for _, part in results for mistake in part}
    return sorted(mistakes | {f"{name} is missing" for name in missing})


def share_files(
    files: Mapping[str, FileRecord], *, rank: int, num_ranks: int
) -> dict[str, FileRecord]:
    """Return this rank's share of the files; all shares have about the same number of bytes."""
    loads, mine = [0] * num_ranks, {}
    for name in sorted(files, key=lambda name: (-files[name].size, name)):
        taker = loads.index(min(loads))
        loads[taker] += files[name].size
        if taker == rank:
            mine[name] = files[name]
    return mine


def find_damage(folder: Path, files: Mapping[str, FileRecord], *, hashes: bool = True) -> list[str]:
    """Return a mistake for each file that is missing or differs from its record.

    Without `hashes` only sizes are compared.
    """
    mistakes = []
    for name, record in files.items():
        path = folder / name
        try:
            check_is_file(path)
            if (size := path.stat().st_size) != record.size:
                mistakes.append(f"{name} has {size} bytes, not {record.size}")
            elif hashes and hash_file(path) != record.digest:
                mistakes.append(f"{name} is damaged: its checksum differs")
        except OSError as error:
            mistakes.append(f"{name} cannot be read: {error.strerror}")
    return mistakes


def summarize(mistakes: list[str]) -> str:
    """Join mistakes into one line, at most five of them."""
    suffix = f"; and {len(mistakes) - 5} more" if len(mistakes) > 5 else ""
    return "; ".join(mistakes[:5]) + suffix
