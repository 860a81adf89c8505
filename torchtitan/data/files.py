"""Find the files that an entry of `dataset_path` names.

An entry is a path, a glob, a folder (all files below it), either file or the prefix of a token
store, or the folder of a dataset saved by the library `datasets`.

Objects that a URL names are copied to this machine, since samples are drawn by number and a resumed
run must read the same ones. Their folder in the cache is named by a hash of the objects' names,
sizes and versions: changed objects get another folder, and those copied before an interrupted start
are not copied again. One process per machine copies while other processes wait.
"""

from __future__ import annotations

import fcntl
import glob
import hashlib
import json
import logging
import os
import posixpath
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from os.path import exists, realpath
from pathlib import Path, PurePosixPath
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone, user_path
from torchtitan.base.log import plural
from torchtitan.base.urls import READ_ONLY, is_url, missing_package, url_problem, without_secrets
from torchtitan.data.holdout import HELD_OUT
from torchtitan.data.settings import DEFAULT_CACHE, FETCHED, SAVED
from torchtitan.data.store import STORE_SUFFIXES

logger = logging.getLogger(__name__)
FILES_AT_ONCE = 4
# keys of an object's entry that change with its content; stores differ in capitals and underscores
DIGESTS = {"etag", "md5hash", "contentmd5", "generation"}
TIMES = {"lastmodified", "mtime", "created"}
SIGNED_URL = r"(?i)[?&][^/=]*(sig|token)[^/=]*="


def find_files(
    pattern: str, *, key: str = "dataset_path", cache: str = DEFAULT_CACHE
) -> list[Path]:
    """Return the files that one entry of the setting `key` names, sorted.

    A token store appears once, as its `.idx` file. Empty files found by a glob or in a folder are
    skipped. Objects named by a URL are copied into `cache`.

    Raises:
        DataError: No file is found, a file is not supported, or a named file is empty.
    """
    from torchtitan.data.readers import check_suffix, for_each

    if pattern.lower().startswith("hf://"):
        rule = f'must name files, got {pattern!r}; to stream it, set training.dataset = "'
        raise DataError.at(key, f'{rule}torchtitan.data.hub:HubText"')
    if is_url(pattern):
        pattern = fetch(pattern, cache=user_path(cache, key="dataset_cache"), key=key)
    path = user_path(pattern, key=key)
    if (path / SAVED).is_file():
        return _files_of_saved_dataset(path, key=key)
    if splits := sorted(saved.parent.name for saved in path.glob(f"*/{SAVED}")):
        rule = f"must name one saved dataset, {pattern!r} holds {', '.join(splits)}"
        raise DataError.at(key, rule)
    if path.is_dir():
        path = Path(glob.escape(str(path)), "**/*")
    elif Path(f"{path}.idx").exists():
        path = Path(f"{path}.idx")
    is_named = path.exists()
    if is_named:
        paths = [path]
    else:  # without documents that `prepare --holdout_fraction` held out
        names = glob.glob(str(path), recursive=True)
        paths = [match for name in names if HELD_OUT not in (match := Path(name)).name]
    # realpath: exists() follows at most 40 links
    if broken := [p for p in paths if p.is_symlink() and not exists(realpath(p))]:
        raise DataError.at(key, f"{min(broken)} is a link to a file that does not exist")
    files = {file for file in paths if file.is_file()}
    files = {f.with_suffix(".idx") if f.suffix in STORE_SUFFIXES else f for f in files}
    if not files:
        rule = f"no file matches {pattern!r:.200}; relative paths start at {Path.cwd()}"
        raise DataError.at(key, rule)
    for_each(sorted(files), check_suffix)
    empty = {file for file in files if file.exists() and file.stat().st_size == 0}
    if empty and (is_named or empty == files):
        raise DataError.at(key, f"a file must not be empty: {min(empty)}; remove it")
    if empty:
        num_files = plural(len(files), "file")
        logger.warning("skipping %d of %s in %s: empty", len(empty), num_files, pattern)
    return sorted(files - empty)


def find_all(entries: Sequence[str], *, cache: str, once: Once = alone) -> list[list[Path]]:
    """Return the files of each entry of `dataset_path`, as `find_files` does."""
    from torchtitan.data.readers import for_each

    def find() -> list[list[str]]:
        # mistakes in local entries are reported before downloads
        order = sorted(range(len(entries)), key=lambda i: is_url(entries[i]))
        num_local = sum(not is_url(entry) for entry in entries)
        files: dict[int, list[str]] = {}
        for group in (order[:num_local], order[num_local:]):
            groups = for_each(group, lambda i: find_files(entries[i], cache=cache))
            files |= {i: [*map(str, paths)] for i, paths in zip(group, groups, strict=True)}
        return [files[i] for i in range(len(entries))]

    return [[*map(Path, files)] for files in once(find)]


def divide(files: Iterable[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files to tokenize, and the prefixes of the token stores."""
    files = tuple(files)
    stores = tuple(file.with_suffix("") for file in files if file.suffix in STORE_SUFFIXES)
    return tuple(file for file in files if file.suffix not in STORE_SUFFIXES), stores


def file_identity(file: Path) -> str:
    """Return a string that changes when the file is written or replaced.

    A copy of an object has the same identity on every machine.
    """
    status = file.stat()
    copy = re.search(rf"/{FETCHED}/([0-9a-f]{{32}}/.*)", file.resolve().as_posix())
    if copy is not None:
        return f"{FETCHED} {copy[1]} {status.st_size}"
    # with the change time, which also differs for a copy of equal size and modification time
    return f"{file.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _files_of_saved_dataset(folder: Path, *, key: str) -> list[Path]:
    try:
        state = json.loads((folder / SAVED).read_bytes())
        names = [Path(file["filename"]) for file in state["_data_files"]]
        if any(name.name != str(name) for name in names):
            raise ValueError("a file must be in the folder itself")
        files = [folder / name for name in names]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"{folder / SAVED} must list the files of a saved dataset: {error}"
        raise DataError.at(key, rule) from error
    if missing := [file for file in files if not file.is_file()]:
        raise DataError.at(key, f"{folder / SAVED} lists {missing[0]}, which is missing")
    if not files:
        raise DataError.at(key, f"the saved dataset {folder} holds no rows; remove it")
    return files


@contextmanager
def locked(file: Path) -> Iterator[None]:
    """Hold a lock that one process of this machine has at a time. It ends with its process.

    The holder may delete the file.
    """
    while True:
        with file.open("w") as handle:
            fcntl.flock(handle, fcntl.LOCK_EX)
            if os.fstat(handle.fileno()).st_nlink:  # else it was deleted meanwhile
                yield
                return


def fetch(url: str, *, cache: Path, key: str = "dataset_path") -> str:
    """Copy the objects that a URL names, and return the path or glob of the copies.

    Raises:
        DataError: The URL is wrong, no object exists, or copying failed.
    """
    if problem := url_problem(url, also=READ_ONLY):
        raise DataError.at(key, problem)
    if re.match(r"[^/]*@", url.partition("://")[2]) or re.search(SIGNED_URL, url):
        rule = "must not hold credentials; set the variables that the store's client reads"
        raise DataError.at(key, rule)
    try:
        import fsspec

        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        entries = _list(store, path)
        files = _copy(store, entries, cache=cache, url=url) if entries else {}
    except ImportError as error:
        raise DataError.at(key, f"{url!r} {missing_package(url, error)}") from None
    except Exception as error:  # of the store's client, without a common class
        message = without_secrets((str(error).splitlines() or [""])[0])
        rule = f"could not copy from {url!r}: {type(error).__name__}: {message:.160}"
        raise DataError.at(key, rule) from error
    if not files:
        rule = f"no object matches {url!r}; to name a folder, write a glob such as /**/*.jsonl"
        raise DataError.at(key, rule)
    if _is_glob(path):
        parents = [str(file.parent) for file in files.values()]
        return f"{glob.escape(posixpath.commonpath(parents))}/**/*"
    if saved := [file for file in files.values() if file.name == SAVED]:
        return str(saved[0].parent)
    return str(min(files.values(), key=lambda file: file.suffix != ".idx"))  # of a store the index


def _is_glob(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _list(store: Any, path: str) -> dict[str, Mapping[str, Any]]:
    """Return the entries of the objects that a path names, by name, with both files of a store."""

    def look(name: str) -> Mapping[str, Any] | None:
        # `isfile` and `exists` would return False too if the store does not answer
        try:
            entry: Mapping[str, Any] = store.info(name)
        except FileNotFoundError:
            return None
        return entry if entry["type"] == "file" else None

    if _is_glob(path):
        # hidden files are skipped, as by a glob on a disk
        entries = {n: e for n, e in store.glob(path, detail=True).items() if "/." not in n}
    elif entry := look(path):
        entries = {path: entry}
    elif entry := look(f"{path}.idx"):
        entries = {f"{path}.idx": entry}
    elif look(f"{path.rstrip('/')}/{SAVED}"):
        entries = store.find(path, detail=True)
    else:
        return {}
    for name in [name for name in entries if name.endswith(STORE_SUFFIXES)]:
        twin = name[:-4] + {".bin": ".idx", ".idx": ".bin"}[name[-4:]]
        if twin not in entries and (entry := look(twin)):
            entries[twin] = entry
    return {name: entry for name, entry in entries.items() if entry["type"] == "file"}


def _version(entry: Mapping[str, Any]) -> dict[str, str]:
    """Return the values that change with an object besides its size: digests, or else times."""
    values = {key.lower().replace("_", "").replace("-", ""): entry[key] for key in entry}
    keys = values.keys() & DIGESTS or values.keys() & TIMES
    return {key: str(values[key]) for key in sorted(keys)}


def _copy(
    store: Any, entries: Mapping[str, Mapping[str, Any]], *, cache: Path, url: str
) -> dict[str, Path]:
    """Copy the objects that were not copied yet; return the copies by the objects' names."""
    versions = [(name, entries[name]["size"], _version(entries[name])) for name in sorted(entries)]
    digest = hashlib.sha256(repr((url.partition("://")[0], versions)).encode()).hexdigest()
    folder = cache / FETCHED / digest[:32]
    root = posixpath.commonpath([posixpath.dirname(name) for name in entries])
    targets = {name: folder / PurePosixPath(name).relative_to(root) for name in entries}
    if len({*targets.values()}) < len(targets) or any(".." in t.parts for t in targets.values()):
        raise ValueError("names of objects must be paths below a folder, without .. and //")

    def get(name: str) -> None:
        target = targets[name]
        target.parent.mkdir(parents=True, exist_ok=True)
        unfinished = target.with_name(f".{target.name}.tmp")
        store.get_file(name, str(unfinished))
        copied, size = unfinished.stat().st_size, entries[name]["size"]
        if size not in (None, copied):
            raise OSError(f"copied {copied} of {size} bytes of {name}")
        unfinished.replace(target)

    folder.mkdir(parents=True, exist_ok=True)
    with locked(folder.with_suffix(".lock")):
        missing = [name for name, target in targets.items() if not target.exists()]
        if missing:
            megabytes = sum(entries[name]["size"] or 0 for name in missing) / 1e6
            files = plural(len(missing), "file")
            logger.info("copying %s (%.1f MB) of %s into %s", files, megabytes, url, folder)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(get, missing))
    return targets
