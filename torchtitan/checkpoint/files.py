"""Files that know their checksum: hashed while they are written, on disk when they are closed.

A disk, a network file system or a copying tool may change a byte without an error, and a model
loads and trains on with the wrong weight. So each file's size and digest are taken from the bytes
that go to the disk, not read back from it, and are kept in the manifest, which is sealed by a
digest of its own.

The digest is XXH3 (128 bits). It guards against accidents, not against a forger, who could write a
new manifest too; that nothing read can do harm is the business of `metadata.py`. SHA-256 and CRC-32
are in the standard library but take as long as the reading itself; XXH3 runs as fast as memory.
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

import xxhash
from torch.distributed.checkpoint.filesystem import FileSystem

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file, load_json

_CHUNK = 1 << 20  # what was read is hashed before it leaves the processor's cache
_SEALED = re.compile(rb'(\{.*,\n) "checksum": "([0-9a-f]{32})"\n\}\n', re.DOTALL)


@dataclass(frozen=True)
class FileRecord:
    """What a file must be: its size in bytes, and the digest of them."""

    size: int
    digest: str


class HashingFile(io.BufferedWriter):
    """A new file, written from front to back; `record` is of all that was written."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "wb"))
        self._hash = xxhash.xxh3_128()
        self._size = 0
        self.failure: OSError | None = None
        """What a write has failed with; a writer may go on and raise something else."""

    def write(self, data: Any) -> int:
        """Write and hash bytes."""
        self._hash.update(data)
        self._size += memoryview(data).nbytes
        try:
            return super().write(data)
        except OSError as error:
            self.failure = error
            raise

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Refuse: what was hashed cannot be written over."""
        raise io.UnsupportedOperation("a HashingFile is written from front to back")

    def close(self) -> None:
        """Close the file once its bytes are on the disk."""
        try:
            if not self.closed:
                self.flush()
                os.fsync(self.fileno())
        finally:
            super().close()

    @property
    def record(self) -> FileRecord:
        """Size and digest so far."""
        return FileRecord(self._size, self._hash.hexdigest())


class HashingFileSystem(FileSystem):
    """The files that a DCP writer writes, with the records of them by name."""

    def __init__(self) -> None:
        self.records: dict[str, FileRecord] = {}

    @contextmanager
    def create_stream(
        self, path: str | os.PathLike[str], mode: str
    ) -> Generator[io.IOBase, None, None]:
        """Open a file; one that is written is on disk and in `records` when it is closed."""
        if mode != "wb":
            with super().create_stream(path, mode) as stream:
                yield stream
            return
        with HashingFile(Path(path)) as file:
            try:
                yield file
            except Exception as error:
                if file.failure is None:
                    raise
                # torch's zip writer complains of its position where the disk is full
                raise file.failure from error
        self.records[Path(path).name] = file.record

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file and its record another name."""
        super().rename(path, new_path)
        self.records[Path(new_path).name] = self.records.pop(Path(path).name)


def hash_file(path: Path) -> str:
    """Return the digest of a file's bytes."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_CHUNK))  # one for the whole file: no page of it is new memory
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, as fsync does for a file's bytes."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, content: Mapping[str, Any]) -> FileRecord:
    """Write an object, and return the record of the file."""
    with HashingFile(path) as file:
        file.write(json.dumps(content, indent=1).encode())
    return file.record


class Content(dict[str, Any]):
    """An object read from a file, which names the file when a key is not there."""

    def __init__(self, path: Path, content: Mapping[str, Any]) -> None:
        super().__init__(content)
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise CheckpointError(f"{self.path} is damaged: it lacks '{key}'; use another checkpoint")

    def __reduce__(self) -> tuple[type[Content], tuple[Path, dict[str, Any]]]:
        return Content, (self.path, dict(self))


def checked_kinds(content: Content, *, kinds: Mapping[str, type]) -> Content:
    """Return `content` if what it has of these keys is of these types."""
    for key, kind in kinds.items():
        # exact: JSON's true is an int to isinstance
        if key in content and type(content[key]) is not kind:
            raise CheckpointError(
                f"{content.path} is damaged: '{key}' must be of type {kind.__name__}, got "
                f"{str(content[key])[:60]!r}; use another checkpoint"
            )
    return content


def check_counts(content: Content, *keys: str) -> None:
    """Refuse what no run has counted to: the run would go on anywhere."""
    for key in keys:
        if not 0 <= content[key] < 2**63:
            raise CheckpointError(
                f"{content.path} is damaged: '{key}' must be 0 or more and fit into 64 bits, got "
                f"{str(content[key])[:60]}; use another checkpoint"
            )


def read_json(path: Path) -> Content:
    """Read an object; asked for a key that it lacks, it raises CheckpointError.

    Raises:
        CheckpointError: The file is missing, or is not JSON, or holds something else.
    """
    try:
        check_is_file(path)
        return parse_json(path.read_bytes(), path=path)
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def parse_json(data: bytes, *, path: Path) -> Content:
    """Return the object that `data`, read from `path`, holds; raise as `read_json` does."""
    try:
        content = load_json(data.decode())
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object, got {type(content).__name__}")
    return Content(path, content)


def write_sealed_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object whose last line is the digest of all the lines before."""
    lines = json.dumps(content, indent=1).encode().removesuffix(b"\n}") + b",\n"
    seal = xxhash.xxh3_128(lines).hexdigest()
    with HashingFile(path) as file:
        file.write(lines + f' "checksum": "{seal}"\n}}\n'.encode())


def seal_is_whole(path: Path) -> bool:
    """Tell whether every byte of a sealed file is as it was written."""
    return is_sealed(path.read_bytes())


def is_sealed(content: bytes) -> bool:
    """Tell whether these are all the bytes of a sealed file, as they were written."""
    match = _SEALED.fullmatch(content)
    return match is not None and xxhash.xxh3_128(match[1]).hexdigest() == match[2].decode()
