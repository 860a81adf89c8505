"""Copy data files from an object store to this machine.

    --training.dataset_path 's3://bucket/corpus/**/*.jsonl.zst'

Samples are drawn by number and a resumed run must read the same samples, so data are not streamed.
The objects that a URL names are copied into `fetched` in `dataset_cache`, by one process per
machine while the other processes wait. The folder is named by a fingerprint of the objects' names,
sizes and versions, so that objects that changed get another folder, and objects copied before an
interrupted start are not copied again. Like the rest of the cache, copies are never deleted.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import posixpath
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from filelock import FileLock

from torchtitan.base.errors import DataError
from torchtitan.base.log import plural
from torchtitan.base.urls import READ_ONLY, missing_package, url_problem, without_secrets
from torchtitan.data.settings import FETCHED, SAVED
from torchtitan.data.store import STORE_SUFFIXES

logger = logging.getLogger(__name__)
FILES_AT_ONCE = 4
# keys of an object's entry that change with its content; stores differ in capitals and underscores
DIGESTS = {"etag", "md5hash", "contentmd5", "generation"}
TIMES = {"lastmodified", "mtime", "created"}
SIGNED_URL = r"(?i)[?&][^/=]*(sig|token)[^/=]*="
Entry = Mapping[str, Any]
"""An object's entry in the listing of its store: type, size and other keys."""


def fetch_files(url: str, *, cache: Path, key: str) -> str:
    """Copy the objects named by a URL, and return the path or glob of the copies.

    The URL names an object, a glob, a token store or a saved dataset.

    Args:
        url: Value of a setting.
        cache: Folder that holds the copies.
        key: Name of the setting in error messages.

    Raises:
        DataError: No object exists, or copying failed.
    """
    store, path = _open_store(url, key=key)
    with _as_data_error(url, key=key):
        found = _find(store, path)
        if not found:
            rule = f"no object matches {url!r}; to name a folder, write a glob such as /**/*.jsonl"
            raise DataError.at(key, rule)
        root = posixpath.commonpath([str(PurePosixPath(name).parent) for name in found])
        folder = cache / FETCHED / _fingerprint(url, found)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            _copy(store, found, root=root, folder=folder, url=url)
    escaped = glob.escape(str(folder))
    if _is_glob(url):
        return f"{escaped}/**/*"
    names = [str(PurePosixPath(name).relative_to(root)) for name in sorted(found)]
    if SAVED in names:
        return str(folder)
    # of a token store the index
    return str(folder / next((name for name in names if name.endswith(".idx")), names[0]))


def _open_store(url: str, *, key: str) -> tuple[Any, str]:
    """Return the store of a URL, and the path in it."""
    if problem := url_problem(url, also=READ_ONLY):
        raise DataError.at(key, problem)
    if re.match(r"[^/]*@", url.partition("://")[2]) or re.search(SIGNED_URL, url):
        rule = "must not hold credentials; set the variables that the store's client reads"
        raise DataError.at(key, rule)
    try:
        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise DataError.at(key, f"{url!r} {missing_package(url, error)}") from None
    return store, path


@contextmanager
def _as_data_error(url: str, *, key: str) -> Iterator[None]:
    """Turn what a store's client raises, without a common base class, into a DataError."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        message = without_secrets((str(error).splitlines() or [""])[0])
        rule = f"could not copy from {url!r}: {type(error).__name__}: {message:.160}; "
        rule += "fix the access to the store, or free space"
        raise DataError.at(key, rule) from error


def _find(store: Any, path: str) -> dict[str, Entry]:
    """Return the entries of the objects that a path names, by name."""
    found: dict[str, Entry] = {}
    names: set[str] = set()
    if _is_glob(path):
        matches = store.glob(path, detail=True)
        # hidden files are skipped, as by a glob on a disk
        found = {name: entry for name, entry in matches.items() if "/." not in name}
        names = {other for name in found if (other := _other_file(name))} - found.keys()
    elif _look(store, path) is not None:
        names = {path, _other_file(path) or path}
    elif _look(store, f"{path}.idx") is not None:
        names = {f"{path}{suffix}" for suffix in STORE_SUFFIXES}
    elif _look(store, f"{path.rstrip('/')}/{SAVED}") is not None:
        found = store.find(path, detail=True)
    found |= {name: entry for name in names if (entry := _look(store, name)) is not None}
    return {name: entry for name, entry in found.items() if entry["type"] == "file"}


def _look(store: Any, path: str) -> Entry | None:
    """Return an object's entry, or None if it does not exist.

    `isfile` and `exists` would return False too if the store does not answer.
    """
    try:
        entry: Entry = store.info(path)
    except FileNotFoundError:
        return None
    return entry if entry["type"] == "file" else None


def _is_glob(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _other_file(name: str) -> str | None:
    """Return the other file of a token store."""
    path = PurePosixPath(name)
    other = {".bin": ".idx", ".idx": ".bin"}.get(path.suffix)
    return None if other is None else str(path.with_suffix(other))


def _fingerprint(url: str, found: Mapping[str, Entry]) -> str:
    entries = [(name, found[name]["size"], _version(found[name])) for name in sorted(found)]
    return hashlib.sha256(repr((url.partition("://")[0], entries)).encode()).hexdigest()[:32]


def _version(entry: Entry) -> dict[str, str]:
    """Return the values that change with an object besides its size: digests, or else times."""
    values = {key.lower().replace("_", "").replace("-", ""): entry[key] for key in entry}
    keys = values.keys() & DIGESTS or values.keys() & TIMES
    return {key: str(values[key]) for key in sorted(keys)}


def _copy(store: Any, found: Mapping[str, Entry], *, root: str, folder: Path, url: str) -> None:
    """Copy the objects that are not in `folder` yet.

    Args:
        store: File system of fsspec.
        found: Entries of the objects, by name.
        root: Common folder of the objects.
        folder: Folder that the copies go to.
        url: Name of the objects for the log.
    """
    targets = {name: folder / PurePosixPath(name).relative_to(root) for name in found}
    if len({*targets.values()}) < len(targets) or any(".." in t.parts for t in targets.values()):
        raise ValueError("names of objects must be paths below a folder, without .. and //")
    missing = {name: target for name, target in targets.items() if not target.exists()}
    if not missing:
        return
    num_megabytes = sum(found[name]["size"] or 0 for name in missing) / 1e6
    files = plural(len(missing), "file")
    logger.info("copying %s (%.1f MB) of %s into %s", files, num_megabytes, url, folder)

    def copy(name: str) -> None:
        target = missing[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.tmp")
        store.get_file(name, str(unfinished))
        copied, size = unfinished.stat().st_size, found[name]["size"]
        if size not in (None, copied):
            raise OSError(f"copied {copied} of {size} bytes of {name}")
        unfinished.replace(target)

    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        list(pool.map(copy, missing))
