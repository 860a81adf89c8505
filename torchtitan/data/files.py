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
from pathlib import Path, PurePosixPath
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone, user_path
from torchtitan.base.log import plural
from torchtitan.base.urls import READ_ONLY, is_url, missing_package, url_problem, without_secrets
from torchtitan.data.holdout import HELD_OUT
from torchtitan.data.readers import READERS, suffix_of
from torchtitan.data.settings import DEFAULT_CACHE, FETCHED, SAVED
from torchtitan.data.store import STORE_SUFFIXES

logger = logging.getLogger(__name__)
FILES_AT_ONCE = 4
VERSIONS = ("etag", "md5", "generation", "modified", "mtime", "created")
"""Parts of the keys of an object's entry that change with its content, in any store."""
CREDENTIALS = re.compile(r"(?i)://[^/]*@|[?&][^/=]*(sig|token)[^/=]*=")


def find_files(
    pattern: str, *, key: str = "dataset_path", cache: str = DEFAULT_CACHE
) -> list[Path]:
    """Return the files that one entry of the setting `key` names, sorted.

    A token store appears once, as its `.idx` file. Empty files found by a glob or in a folder are
    skipped, and so are stores of held-out documents if there are others. Objects named by a URL are
    copied into `cache`. Raises DataError if no file is found, or a link is broken.
    """
    if is_url(pattern):
        path = fetch(pattern, cache=user_path(cache, key="dataset_cache"), key=key)
    else:
        path = user_path(pattern, key=key)
    if (path / SAVED).is_file():
        return _files_of_saved_dataset(path, key=key)
    if splits := sorted(saved.parent.name for saved in path.glob(f"*/{SAVED}")):
        rule = f"must name one saved dataset, {pattern!r} holds {', '.join(splits)}"
        raise DataError.at(key, rule)
    if not path.is_dir() and (index := Path(f"{path}.idx")).exists():
        path = index
    if path.is_file():
        files = {path}
    else:
        name = f"{glob.escape(str(path))}/**/*" if path.is_dir() else str(path)
        paths = [Path(match) for match in glob.glob(name, recursive=True)]
        paths = [path for path in paths if HELD_OUT not in path.name] or paths
        if broken := [path for path in paths if path.is_symlink() and not path.exists()]:
            raise DataError.at(key, f"{min(broken)} is a link to a file that does not exist")
        all_files = [path for path in paths if path.is_file()]
        files = {path for path in all_files if path.stat().st_size > 0}
        if num_empty := len(all_files) - len(files):
            total = plural(len(all_files), "file")
            logger.warning("skipping %d of %s in %s: empty", num_empty, total, pattern)
    for file in sorted(files):  # such as a.jsonl.bak
        if suffix_of(file) not in READERS and {*file.suffixes[:-1]} & {*READERS}:
            rule = f"{file} has the suffix of a table before its last one; move it away"
            raise DataError.at(key, rule)
    if not files:
        rule = f"no file matches {pattern!r:.200}; relative paths start at {Path.cwd()}"
        raise DataError.at(key, rule)
    return sorted({f.with_suffix(".idx") if f.suffix in STORE_SUFFIXES else f for f in files})


def find_all(entries: Sequence[str], *, cache: str, once: Once = alone) -> list[list[Path]]:
    """Return the files of each entry of `dataset_path`, as `find_files` does."""

    def find() -> list[list[str]]:
        # local entries first: their mistakes are raised before downloads
        files = {entry: find_files(entry, cache=cache) for entry in sorted(entries, key=is_url)}
        return [[*map(str, files[entry])] for entry in entries]

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
        names = [str(file["filename"]) for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"{folder / SAVED} must list the files of a saved dataset: {error!r}"
        raise DataError.at(key, rule) from error
    wrong = [name for name in names if Path(name).name != name or not (folder / name).is_file()]
    if wrong or not names:
        raise DataError.at(key, f"{folder / SAVED} must list files beside it, got {wrong}")
    return [folder / name for name in names]


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


def fetch(url: str, *, cache: Path, key: str) -> Path:
    """Copy the objects that a URL names, and return the folder of the copies; raise DataError if
    the URL is wrong, no object exists, or copying failed."""
    if problem := url_problem(url, also=READ_ONLY):
        raise DataError.at(key, problem)
    if CREDENTIALS.search(url):
        rule = "must not hold credentials; set the variables that the store's client reads"
        raise DataError.at(key, rule)
    try:
        import fsspec

        store, path = fsspec.core.url_to_fs(url, use_listings_cache=False)
        if entries := _list(store, path):
            return _copy(store, entries, cache=cache, url=url)
    except ImportError as error:
        raise DataError.at(key, f"{url!r} {missing_package(url, error)}") from None
    except Exception as error:  # of the store's client, without a common class
        message = without_secrets((str(error).splitlines() or [""])[0])
        rule = f"could not copy from {url!r}: {type(error).__name__}: {message:.160}"
        raise DataError.at(key, rule) from error
    rule = f"no object matches {url!r}; to name a folder, write a glob such as /**/*.jsonl"
    raise DataError.at(key, rule)


def _list(store: Any, path: str) -> dict[str, Mapping[str, Any]]:
    """Return the entries of the objects that a path names, by name, with both files of a store."""

    def look(name: str) -> dict[str, Mapping[str, Any]]:
        # `isfile` and `exists` would return False too if the store does not answer
        try:
            entry = store.info(name)
        except FileNotFoundError:
            return {}
        return {name: entry} if entry["type"] == "file" else {}

    if any(sign in path for sign in "*?["):
        # hidden files are skipped, as by a glob on a disk
        entries = {n: e for n, e in store.glob(path, detail=True).items() if "/." not in n}
    else:
        entries = look(path) or look(f"{path}.idx")
        if not entries and look(f"{path.rstrip('/')}/{SAVED}"):
            entries = store.find(path, detail=True)
    for name in [name for name in entries if name.endswith(STORE_SUFFIXES)]:
        entries = {**look(f"{name[:-4]}.idx"), **look(f"{name[:-4]}.bin"), **entries}
    return {name: entry for name, entry in entries.items() if entry["type"] == "file"}


def _copy(store: Any, entries: Mapping[str, Mapping[str, Any]], *, cache: Path, url: str) -> Path:
    """Copy the objects that were not copied yet; return the folder of the copies."""
    decides: list[object] = [url.partition("://")[0]]
    for name, entry in sorted(entries.items()):
        versions = [key for key in entry if any(part in key.lower() for part in VERSIONS)]
        decides.append([name, entry["size"], [str(entry[key]) for key in sorted(versions)]])
    folder = cache / FETCHED / hashlib.sha256(repr(decides).encode()).hexdigest()[:32]
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
            logger.info("copying %s of %s into %s", plural(len(missing), "file"), url, folder)
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            list(pool.map(get, missing))
    return folder
