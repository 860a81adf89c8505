"""Data files that lie in an object store: copied to this machine once, then read as any file.

    --training.dataset_path 's3://bucket/corpus/**/*.jsonl.zst'

Samples are drawn by number, so what is read must be here, and a run that resumes reads the same. So
the objects that a URL names are copied into `fetched` inside `dataset_cache`, by one process of a
machine while the others wait, into a folder named by a fingerprint of their names, sizes and
versions in the store. What has changed there is another folder; what an earlier start copied before
it was ended is not copied again. Copies are never deleted, as all of the cache.
"""

from __future__ import annotations

import glob
import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from filelock import FileLock

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.base.urls import missing_package
from torchtitan.config.types import is_url
from torchtitan.data.formats import STORES
from torchtitan.data.settings import DEFAULT_CACHE

logger = logging.getLogger(__name__)
FETCHED, FILES = "fetched", 4
VERSION = ("ETag", "md5Hash", "generation", "LastModified", "mtime", "created")
"""What stores tell of an object that changes with it."""
SAVED = "state.json"
"""What `datasets.save_to_disk` writes beside its .arrow files, and what lists them."""


def local_cache(cache: str) -> str:
    """Return the folder on this machine that the setting dataset_cache means: of a URL, which is a
    cache that machines share, the default one."""
    return DEFAULT_CACHE if is_url(cache) else cache


def copy_identity(file: Path) -> str | None:
    """Return what tells a copy that `fetch_files` has made, the same on every machine; None: it is
    another file."""
    found = re.search(rf"/{FETCHED}/([0-9a-f]{{32}}/.*)", file.resolve().as_posix())
    return found and f"{FETCHED} {found[1]} {file.stat().st_size}"


def bring_folder(url: str, folder: Path, *, last: str) -> bool:
    """Copy a folder that `send_folder` has sent; tell whether there is one. `last`: its file that
    was sent last."""
    store, path = open_url(url, key="dataset_cache")
    with _telling(url, key="dataset_cache"):
        if not store.isfile(f"{path}/{last}"):
            return False
        folder.mkdir(parents=True)
        for name in store.find(path):
            store.get_file(name, str(folder / PurePosixPath(name).name))
    return True


def send_folder(folder: Path, url: str, *, last: str) -> None:
    """Copy the files of a folder to a URL; one without the file `last` is not whole."""
    store, path = open_url(url, key="dataset_cache")
    with _telling(url, key="dataset_cache"):
        store.makedirs(path, exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == last):
            store.put_file(str(file), f"{path}/{file.name}")


@contextmanager
def _telling(url: str, *, key: str) -> Iterator[None]:
    """Turn what a store's client raises, each of classes of its own, into an error of the data."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        said = (str(error).splitlines() or [""])[0]
        rule = f"could not copy from or to {url!r}: {type(error).__name__}: {said:.160}"
        raise DataError.at(key, f"{rule}; mend the access to the store, or make room") from error


def open_url(url: str, *, key: str) -> tuple[Any, str]:
    """Return the store of a URL, the value of the setting `key`, and the path in it.

    Raises:
        DataError: Its package is missing, or it holds credentials.
    """
    if re.match(r"[^/]*@", url.partition("://")[2]):
        rule = "must not hold credentials; give them to the store's client, as its own variables do"
        raise DataError.at(key, rule)
    try:
        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise DataError.at(key, f"{url!r} {missing_package(url, error)}") from None
    except ValueError as error:
        raise DataError.at(key, f"{url!r} is of no kind that fsspec knows: {error}") from None
    return store, path


def fetch_files(url: str, *, cache: Path, key: str) -> str:
    """Copy the objects that a URL of the setting `key` names: one, a glob, a token store or a saved
    dataset; return the path or glob of the copies.

    Raises:
        DataError: There are none, or the store or the disk does not let them be copied.
    """
    store, path = open_url(url, key=key)
    with _telling(url, key=key):
        found = _find(store, path)
        if not found:
            hint = "a folder is named by a glob into it, as /**/*.jsonl"
            raise DataError.at(key, f"no object matches {url!r}; {hint}")
        root = _common_folder(found)
        folder = cache / FETCHED / _fingerprint(url, found)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.with_suffix(".lock")):
            _copy(store, found, root=root, folder=folder, url=url)
    place = glob.escape(str(folder))
    if _is_glob(url):
        return f"{place}/**/*"
    return str(folder if f"{root}/{SAVED}" in found else folder / _named(found, root=root))


def _find(store: Any, path: str) -> dict[str, Mapping[str, Any]]:
    """Return what the store knows of each object, by its path."""
    if _is_glob(path):
        found = store.glob(path, detail=True)
        others = {_other_half(name) for name in found} - found.keys() - {""}
        found |= {name: store.info(name) for name in others if store.exists(name)}
    elif store.isfile(path):
        names = filter(None, (path, _other_half(path)))
        found = {name: store.info(name) for name in names if store.exists(name)}
    elif store.isfile(f"{path}.idx"):
        found = {f"{path}{half}": store.info(f"{path}{half}") for half in STORES}
    elif store.isfile(f"{path.rstrip('/')}/{SAVED}"):
        found = store.find(path, detail=True)
    else:
        return {}
    return {name: known for name, known in found.items() if known["type"] == "file"}


def _is_glob(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _other_half(name: str) -> str:
    """Return the other file of a token store; empty: it is none."""
    path = PurePosixPath(name)
    halves = {".bin": ".idx", ".idx": ".bin"}
    return str(path.with_suffix(halves[path.suffix])) if path.suffix in STORES else ""


def _common_folder(found: Mapping[str, object]) -> str:
    parts = [PurePosixPath(name).parent.parts for name in found]
    same = 0
    while all(len(each) > same and each[same] == parts[0][same] for each in parts):
        same += 1
    return str(PurePosixPath(*parts[0][:same])) if same else ""


def _named(found: Mapping[str, object], *, root: str) -> str:
    """Return the one file that is named: of a token store its index."""
    names = [PurePosixPath(name).relative_to(root).as_posix() for name in found]
    return next((name for name in names if name.endswith(".idx")), names[0])


def _fingerprint(url: str, found: Mapping[str, Mapping[str, Any]]) -> str:
    known = [
        (name, found[name]["size"], [str(found[name].get(mark)) for mark in VERSION])
        for name in sorted(found)
    ]
    return hashlib.sha256(repr((url.partition("://")[0], known)).encode()).hexdigest()[:32]


def _copy(
    store: Any, found: Mapping[str, Mapping[str, Any]], *, root: str, folder: Path, url: str
) -> None:
    targets = {name: folder / PurePosixPath(name).relative_to(root) for name in found}
    lacking = {name: target for name, target in targets.items() if not target.exists()}
    if not lacking:
        return
    num_bytes = sum(found[name]["size"] or 0 for name in lacking)
    logger.info(
        "copying %s (%.1f MB) of %s into %s",
        amount(len(lacking), "file"),
        num_bytes / 1e6,
        url,
        folder,
    )

    def copy(name: str) -> None:
        target, size = lacking[name], found[name]["size"]
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.tmp")
        store.get_file(name, str(unfinished))
        came = unfinished.stat().st_size
        if size is not None and came != size:
            unfinished.unlink()
            raise OSError(f"{came} bytes of {name} came, of {size}")
        unfinished.replace(target)

    with ThreadPoolExecutor(FILES) as pool:
        list(pool.map(copy, lacking))
