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
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

import fsspec
from filelock import FileLock

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.base.urls import READ_ONLY, is_url, missing_package, url_problem, without_secrets
from torchtitan.data.formats import STORES
from torchtitan.data.settings import DEFAULT_CACHE

logger = logging.getLogger(__name__)
FETCHED, FILES = "fetched", 4
DIGESTS = {"etag", "md5hash", "contentmd5", "generation"}
TIMES = {"lastmodified", "mtime", "created"}
"""What stores tell of an object that changes with it; some write it with capitals, or with _."""
SIGNED = r"(?i)[?&][^/=]*(sig|token)[^/=]*="
"""Of a URL that gives whoever has it the rights of its maker."""
NUM_TRIES, PAUSE_SECONDS = 4, 1.0
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
        if _look(store, f"{path}/{last}") is None:
            return False
        folder.mkdir(parents=True)
        for name in store.find(path):
            _persist(partial(store.get_file, name, str(folder / PurePosixPath(name).name)))
    return True


def send_folder(folder: Path, url: str, *, last: str) -> None:
    """Copy the files of a folder to a URL; one without the file `last` is not whole."""
    store, path = open_url(url, key="dataset_cache")
    with _telling(url, key="dataset_cache"):
        store.makedirs(path, exist_ok=True)
        for file in sorted(folder.iterdir(), key=lambda file: file.name == last):
            _persist(partial(store.put_file, str(file), f"{path}/{file.name}"))


@contextmanager
def _telling(url: str, *, key: str) -> Iterator[None]:
    """Turn what a store's client raises, each of classes of its own, into an error of the data."""
    try:
        yield
    except DataError:
        raise
    except Exception as error:
        said = without_secrets((str(error).splitlines() or [""])[0])
        rule = f"could not copy from or to {url!r}: {type(error).__name__}: {said:.160}"
        raise DataError.at(key, f"{rule}; mend the access to the store, or make room") from error


def open_url(url: str, *, key: str) -> tuple[Any, str]:
    """Return the store of a URL, the value of the setting `key`, and the path in it.

    Raises:
        DataError: Its scheme is not supported, its package is missing, or it holds credentials.
    """
    if problem := url_problem(url, also=READ_ONLY):
        raise DataError.at(key, problem)
    if re.match(r"[^/]*@", url.partition("://")[2]) or re.search(SIGNED, url):
        rule = "must not hold credentials; give them to the store's client, as its own variables do"
        raise DataError.at(key, rule)
    try:
        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
    except ImportError as error:
        raise DataError.at(key, f"{url!r} {missing_package(url, error)}") from None
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
        # as globs on a disk leave them out
        found = {name: known for name, known in found.items() if "/." not in name}
        names = {_other_half(name) for name in found} - found.keys() - {""}
    elif _look(store, path) is not None:
        found, names = {}, {path, _other_half(path)} - {""}
    elif _look(store, f"{path}.idx") is not None:
        found, names = {}, {f"{path}{half}" for half in STORES}
    elif _look(store, f"{path.rstrip('/')}/{SAVED}") is not None:
        found, names = store.find(path, detail=True), set()
    else:
        return {}
    found |= {name: known for name in names if (known := _look(store, name)) is not None}
    return {name: known for name, known in found.items() if known["type"] == "file"}


def _look(store: Any, path: str) -> Mapping[str, Any] | None:
    """Return what the store knows of an object, None: there is none. (`isfile` and `exists` say
    that of a store that does not answer, too.)"""
    try:
        known: Mapping[str, Any] = store.info(path)
    except FileNotFoundError:
        return None
    return known if known["type"] == "file" else None


def _persist(action: Callable[[], object]) -> None:
    """Do something with a store, again if it fails; not what no repetition mends."""
    for attempt in range(NUM_TRIES):
        try:
            action()
            return
        except (FileNotFoundError, PermissionError):
            raise
        except Exception as error:
            if attempt + 1 == NUM_TRIES:
                raise
            said = without_secrets(f"{type(error).__name__}: {error}")
            logger.warning("a store fails, trying again: %.160s", said)
            time.sleep(PAUSE_SECONDS * 2**attempt)


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
    known = [(name, found[name]["size"], _version(found[name])) for name in sorted(found)]
    if unmarked := [name for name, _, marks in known if not marks]:
        logger.warning(
            "the store tells no version of %s: a change that keeps its size is not noticed",
            unmarked[0],
        )
    return hashlib.sha256(repr((url.partition("://")[0], known)).encode()).hexdigest()[:32]


def _version(known: Mapping[str, Any]) -> dict[str, str]:
    """Return what changes with an object, besides its size: digests, or else times."""
    marks = {name.lower().replace("_", "").replace("-", ""): known[name] for name in known}
    kinds = marks.keys() & DIGESTS or marks.keys() & TIMES
    # a listing may give as a number what the object's own entry gives as a date
    return {
        kind: str(marks[kind].timestamp() if hasattr(marks[kind], "timestamp") else marks[kind])
        for kind in sorted(kinds)
    }


def _has_changed(then: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    """Tell whether an object has; a listing may know less of it than its own entry."""
    before, after = _version(then), _version(now)
    return any(before[kind] != after[kind] for kind in before.keys() & after.keys())


def _copy(
    store: Any, found: Mapping[str, Mapping[str, Any]], *, root: str, folder: Path, url: str
) -> None:
    targets = {name: folder / PurePosixPath(name).relative_to(root) for name in found}
    if len({*targets.values()}) < len(targets) or any(".." in t.parts for t in targets.values()):
        raise ValueError("names of objects must be paths below a folder, without .. and //")
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
        target = lacking[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.tmp")
        _persist(partial(store.get_file, name, str(unfinished)))
        came, size = unfinished.stat().st_size, found[name]["size"]
        now = _look(store, name)
        if now is None or _has_changed(found[name], now) or size not in (None, came):
            unfinished.unlink()
            raise OSError(
                f"{came} bytes of {name} came, of {size}: or it changed while it was copied"
            )
        unfinished.replace(target)

    with ThreadPoolExecutor(FILES) as pool:
        list(pool.map(copy, lacking))
