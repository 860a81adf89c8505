"""Find the files that an entry of `dataset_path` names.

An entry is a path, a glob, a folder (all files below it), either file or the prefix of a token
store, or the folder of a dataset saved by the library `datasets`. Objects of an object store are
copied to this machine first (`fetch.py`).
"""

from __future__ import annotations

import glob
import json
import logging
import re
from collections.abc import Iterable, Sequence
from os.path import exists, realpath
from pathlib import Path

from torchtitan.base.errors import DataError
from torchtitan.base.files import Once, alone, user_path
from torchtitan.base.log import plural
from torchtitan.base.urls import is_url
from torchtitan.data.holdout import HELD_OUT
from torchtitan.data.settings import DEFAULT_CACHE, FETCHED, SAVED
from torchtitan.data.store import STORE_SUFFIXES

logger = logging.getLogger(__name__)


def find_files(
    pattern: str, *, key: str = "dataset_path", cache: str = DEFAULT_CACHE
) -> list[Path]:
    """Return the files that one entry of the setting `key` names, sorted.

    A token store appears once, as its `.idx` file. Empty files found by a glob or in a folder are
    skipped. Objects named by a URL are copied into `cache`.

    Raises:
        DataError: No file is found, a file is not supported, or a named file is empty.
    """
    if pattern.lower().startswith("hf://"):
        rule = f'must name files, got {pattern!r}; to stream it, set training.dataset = "'
        raise DataError.at(key, f'{rule}torchtitan.data.hub:HubText"')
    if is_url(pattern):
        from torchtitan.data.fetch import fetch_files  # a run on local files loads no client

        pattern = fetch_files(pattern, cache=user_path(cache, key="dataset_cache"), key=key)
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
    found = [path] if is_named else [Path(p) for p in glob.glob(str(path), recursive=True)]
    if not is_named:  # documents that `prepare --holdout_fraction` held out
        found = [file for file in found if HELD_OUT not in file.name]
    # realpath: exists() follows at most 40 links
    if broken := [p for p in found if p.is_symlink() and not exists(realpath(p))]:
        raise DataError.at(key, f"{min(broken)} is a link to a file that does not exist")
    files = sorted({_index_file(file) for file in found if file.is_file()})
    if not files:
        rule = f"no file matches {pattern!r:.200}; relative paths start at {Path.cwd()}"
        raise DataError.at(key, rule)
    from torchtitan.data.readers import check_suffix, for_each

    for_each(files, check_suffix)
    empty = {file for file in files if file.exists() and file.stat().st_size == 0}
    if empty and (is_named or len(empty) == len(files)):
        raise DataError.at(key, f"a file must not be empty: {min(empty)}; remove it")
    if empty:
        num_files = plural(len(files), "file")
        logger.warning("skipping %d of %s in %s: empty", len(empty), num_files, pattern)
    return [file for file in files if file not in empty]


def find_all(entries: Sequence[str], *, cache: str, once: Once = alone) -> list[list[Path]]:
    """Return the files of each entry of `dataset_path`, as `find_files` does."""
    from torchtitan.data.readers import for_each

    def find() -> list[list[str]]:
        found: dict[str, list[str]] = {}
        for is_remote in (False, True):  # mistakes in local entries are reported before downloads
            named = [entry for entry in entries if is_url(entry) is is_remote]
            files = for_each(named, lambda e: [*map(str, find_files(e, cache=cache))])
            found |= zip(named, files, strict=True)
        return [found[entry] for entry in entries]

    found = once(find)
    return [[*map(Path, files)] for files in found]


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
        files = [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"{folder / SAVED} must list the files of a saved dataset: {error}; "
        rule += "save it again"
        raise DataError.at(key, rule) from error
    if missing := [file for file in files if not file.is_file()]:
        rule = f"{folder / SAVED} lists {missing[0]}, which is missing; save the dataset again"
        raise DataError.at(key, rule)
    if not files:
        raise DataError.at(key, f"the saved dataset {folder} holds no rows; remove it")
    return files


def _index_file(file: Path) -> Path:
    return file.with_suffix(".idx") if file.suffix in STORE_SUFFIXES else file
