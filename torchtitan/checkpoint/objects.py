"""Objects in a store by fsspec, with retries and verified uploads.

An object store has no rename and no partial objects: a name has all of its bytes or does not exist.
It also refuses requests when it is busy, and truncates answers. So an answer of the wrong length is
requested again; and an upload is compared with the digest that the store computed (S3's ETag, the
MD5 of Google Cloud Storage), or is read back if it computed none. An ETag that is not the MD5, as
with some encryption, is no error: then the bytes decide.

Each request is repeated with growing pauses until it succeeds or `patience_seconds` have passed. An
error that repeating cannot fix (permissions, bucket, credentials, unsupported request) is raised at
once.

Memory is bounded: reads have at most `STREAMS` parts in flight, writes up to `STREAMS` for each of
`FILES` files. Credentials belong to the store's client (environment, profile, role): a URL must not
have any, and an error of the client is shown in one line without anything that looks like one.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import itertools
import logging
import re
import secrets
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import xxhash

from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.base.urls import missing_package, url_problem, without_secrets
from torchtitan.checkpoint.checksums import FileRecord, HashingFile, hash_file
from torchtitan.mesh.ranks import reason

T = TypeVar("T")
logger = logging.getLogger(__name__)
PART = 16 << 20
STREAMS, FILES = 4, 4
MOST_PARTS = 9000
"""Number of parts of one object; S3 allows 10,000."""
LONGEST_PAUSE = 30.0
NUM_TRIES = 3
"""Number of times to write an object that reads back differently."""
_OPTIONS: dict[str, dict[str, Any]] = {"file": {"auto_mkdir": True}}
_FINAL = (PermissionError, FileNotFoundError, IsADirectoryError)
_FINAL_BY_NAME = re.compile(r"(No|Partial|Default)Credentials|ProfileNotFound|InvalidRegion")


class ObjectStore:
    """The objects whose names start with `url`.

    Raises:
        ConfigError: The scheme of `url`, the value of the setting `key`, is not supported, or its
            package is not installed.
    """

    def __init__(self, url: str, *, key: str, patience_seconds: float) -> None:
        if problem := url_problem(url):
            raise ConfigError.at(key, problem)
        self.url = url.rstrip("/")
        self._patience = patience_seconds
        protocol = url.partition("://")[0]
        self._in_parts = protocol in ("s3", "s3a")
        how = {"use_listings_cache": False, "skip_instance_cache": True}
        try:
            self._fs, root = fsspec.core.url_to_fs(url, **how, **_OPTIONS.get(protocol, {}))
        except ImportError as error:
            raise ConfigError.at(key, missing_package(url, error)) from None
        self._root = root.rstrip("/")

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name else self._root

    def _persist(self, what: str, action: Callable[[], T], *, may_miss: bool = False) -> T | None:
        """Repeat `action` until it succeeds; return its result.

        Args:
            what: Description of the request for messages.
            action: The request.
            may_miss: Whether to return None for an object that does not exist.

        Raises:
            CheckpointError: The error is permanent, or `patience_seconds` have passed.
        """
        began = time.monotonic()
        for attempt in itertools.count():
            try:
                return action()
            except Exception as error:  # noqa: BLE001 - each store's client has classes of its own
                if may_miss and isinstance(error, FileNotFoundError):
                    return None
                spent, failure = time.monotonic() - began, shown(error)
                # ranks must not retry in step; training's random generators are not used
                jitter = 0.5 + secrets.randbelow(1000) / 1000
                pause = min(0.25 * 2**attempt, LONGEST_PAUSE) * jitter
                is_final = (
                    isinstance(error, _FINAL)
                    or _FINAL_BY_NAME.search(type(error).__name__) is not None
                    or (isinstance(error, OSError) and error.errno == errno.ENOSYS)
                )
            if is_final or spent + pause > self._patience:
                after = "" if is_final else f" for {spent:.0f} s"
                raise CheckpointError(
                    f"{self.url}: could not {what}{after}: {failure}; fix the access to the "
                    f"store, and run the same command again"
                ) from None
            logger.warning("%s: could not %s, trying again: %s", self.url, what, failure)
            time.sleep(pause)
        raise AssertionError("an endless loop ended")

    def read(self, name: str) -> bytes | None:
        """Return an object, None if it does not exist."""
        found: bytes | None = self._persist(
            f"read {name}", lambda: self._fs.cat_file(self._path(name)), may_miss=True
        )
        return found

    def write(self, name: str, content: bytes) -> None:
        """Write a small object and read it back."""
        for _ in range(NUM_TRIES):
            self._persist(f"write {name}", lambda: self._fs.pipe_file(self._path(name), content))
            if self.read(name) == content:
                return
        raise CheckpointError(f"{self.url}/{name} reads back differently than it was written")

    def size(self, name: str) -> int | None:
        """Return the size of an object in bytes, None if it does not exist."""
        info = self._info(name)
        return None if info is None else int(info["size"])

    def _info(self, name: str) -> dict[str, Any] | None:
        found: dict[str, Any] | None = self._persist(
            f"look at {name}", lambda: self._fs.info(self._path(name)), may_miss=True
        )
        return found if found is not None and found["type"] == "file" else None

    def put(self, file: Path, name: str, *, record: FileRecord) -> bool:
        """Upload a file unless the object exists already, e.g. from an interrupted upload.

        Returns:
            Whether the file was uploaded.

        Raises:
            CheckpointError: The file does not match `record`, or the upload fails or reads back
                differently.
        """
        part = part_size(record.size)
        goes_in_parts = self._in_parts and record.size >= 2 * part  # s3fs's own rule
        digest = _digest(file, record=record, part=part if goes_in_parts else None)
        if self._holds(name, digest, record=record):
            return False
        # s3fs's default is ten parts of each file at a time
        how = {"chunksize": part, "max_concurrency": STREAMS} if self._in_parts else {}
        for _ in range(NUM_TRIES):
            self._persist(
                f"write {name}", lambda: self._fs.put_file(str(file), self._path(name), **how)
            )
            if self._holds(name, digest, record=record):
                return True
        raise CheckpointError(
            f"{self.url}/{name} was written {NUM_TRIES} times and reads back differently: the "
            f"store or the network changes bytes"
        )

    def put_folder(self, folder: Path, under: str, *, last: Collection[str]) -> None:
        """Upload the files of a folder, those in `last` at the end.

        Raises:
            CheckpointError: As `put`.
        """

        def put(name: str) -> None:
            file = folder / name
            record = FileRecord(file.stat().st_size, hash_file(file))
            self.put(file, f"{under}/{name}" if under else name, record=record)

        names = {str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file()}
        for some in (names.difference(last), names.intersection(last)):
            in_parallel(put, sorted(some))

    def _holds(self, name: str, digest: str, *, record: FileRecord) -> bool:
        """Return whether an object equals a file; `digest` is the one that the store computes."""
        info = self._info(name)
        if info is None or info["size"] != record.size:
            return False
        if _said(info) == digest:
            return True
        found = xxhash.xxh3_128()
        for content in self._parts(name, record.size):
            found.update(content)
        return found.hexdigest() == record.digest

    def fetch(self, name: str, file: Path, *, record: FileRecord) -> str | None:
        """Download an object into a new file; return its mistake or None."""
        size = self.size(name)
        if size is None:
            return f"{name} is missing"
        if size != record.size:
            return f"{name} has {size} bytes, not {record.size}"
        for _ in range(NUM_TRIES):
            with HashingFile(file) as new:
                for content in self._parts(name, size):
                    new.write(content)
            if new.record == record:
                return None
        return f"{name} is damaged: its checksum differs"

    def _parts(self, name: str, size: int) -> Iterator[bytes]:
        """Yield the bytes of an object in order, with `STREAMS` parts in flight."""
        with ThreadPoolExecutor(STREAMS) as pool:
            ahead: deque[Future[bytes]] = deque()
            for start in range(0, size, PART):
                ahead.append(pool.submit(self._part, name, start, min(start + PART, size)))
                if len(ahead) == STREAMS:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()

    def _part(self, name: str, start: int, end: int) -> bytes:
        def read() -> bytes:
            content: bytes = self._fs.cat_file(self._path(name), start=start, end=end)
            if len(content) != end - start:
                raise OSError(f"{len(content)} of {end - start} bytes were received")
            return content

        content = self._persist(f"read {name}", read)
        assert content is not None
        return content

    def list_sizes(self, under: str) -> dict[str, int]:
        """Return the sizes of the objects below `under` by name, from a listing."""
        path = self._path(under)

        def look() -> dict[str, Any]:
            self._fs.invalidate_cache()
            return dict(self._fs.find(path, detail=True))

        found = self._persist(f"list {under}", look, may_miss=True) or {}
        return {name.removeprefix(f"{self._root}/"): info["size"] for name, info in found.items()}

    def list_names(self) -> list[str]:
        """Return the names of the first level, from a listing."""

        def look() -> list[str]:
            self._fs.invalidate_cache()
            return list(self._fs.ls(self._root, detail=False))

        found = self._persist("list it", look, may_miss=True) or []
        return [name.rstrip("/").removeprefix(f"{self._root}/") for name in found]

    def remove(self, names: Collection[str]) -> None:
        """Remove objects, if they exist."""

        def remove(name: str) -> None:
            path = self._path(name)
            self._persist(f"remove {name}", lambda: self._fs.rm_file(path), may_miss=True)

        in_parallel(remove, names)


def in_parallel(action: Callable[[Any], T], items: Collection[Any]) -> list[T]:
    """Return the results of `action` for all items, `FILES` at a time; raise the first error."""
    with ThreadPoolExecutor(FILES) as pool:
        futures = [pool.submit(action, item) for item in items]
        try:
            return [future.result() for future in futures]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def part_size(size: int) -> int:
    """Return the part size for an object, so that it has at most `MOST_PARTS` parts."""
    mib = 1 << 20
    return max(PART, -(-size // (MOST_PARTS * mib)) * mib)


def _digest(file: Path, *, record: FileRecord, part: int | None) -> str:
    """Return the digest that a store computes for a file: its MD5, or S3's ETag of an upload in
    parts of `part` bytes. Raise CheckpointError if the file does not match `record`."""
    whole, parts, ours = hashlib.md5(usedforsecurity=False), [], xxhash.xxh3_128()
    size = 0
    with file.open("rb") as stream:
        while content := stream.read(part or PART):
            size += len(content)
            ours.update(content)
            if part is None:
                whole.update(content)
            else:
                parts.append(hashlib.md5(content, usedforsecurity=False).digest())
    if (size, ours.hexdigest()) != (record.size, record.digest):
        raise CheckpointError(f"{file} is damaged: its checksum differs; it was not uploaded")
    if part is None:
        return whole.hexdigest()
    return f"{hashlib.md5(b''.join(parts), usedforsecurity=False).hexdigest()}-{len(parts)}"


def _said(info: dict[str, Any]) -> str | None:
    """Return the digest that a store computed, None if it has none."""
    if etag := info.get("ETag"):
        return str(etag).strip('"')
    if md5 := info.get("md5Hash"):
        return base64.b64decode(md5).hex()
    return None


def shown(error: BaseException) -> str:
    """Return an error as one line without anything that may be a credential."""
    return without_secrets(reason(error))
