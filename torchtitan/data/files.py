"""Which files an entry of `dataset_path` names: a path, a glob, either file of a store, or the
folder of a saved Hugging Face dataset."""

from __future__ import annotations

import glob
import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable
from itertools import islice
from os.path import exists, realpath
from pathlib import Path
from typing import Any

from torchtitan.base.errors import DataError
from torchtitan.base.log import amount
from torchtitan.base.urls import is_url
from torchtitan.data.formats import PACKED, READ, STORES, format_of, suffix_of
from torchtitan.data.settings import DEFAULT_CACHE
from torchtitan.data.urls import SAVED, fetch_files, local_cache

logger = logging.getLogger(__name__)

HUB = (
    "the order of samples is computed from the number of all samples, which a stream does not "
    'tell, so nothing is streamed here; write training.dataset = "torchtitan.data.hub:HubText", or '
    'download the data once: python -c "import datasets; '
    "datasets.load_dataset('NAME', split='train').save_to_disk('data/NAME')\", and name the "
    "folder data/NAME"
)
HINTS = {
    "$": "variables are not filled in",
    ",": 'several paths are a list: ["a.txt", "b.txt"]',
    "[": "a glob takes [ab] for one of the letters a and b, and [[] for [",
}
MOST_LOOKED_AT, MOST_NAMED = 10_000, 20
Once = Callable[[Callable[[], Any]], Any]
"""Calls a function, here or in another process of this machine; returns what it returned, which
must be as JSON can hold it."""


def alone(work: Callable[[], Any]) -> Any:
    """Call the function here: no other process of this machine needs it."""
    return work()


def user_path(path: str, *, key: str) -> Path:
    """Return the path that the setting `key` gives; raise DataError if it cannot be looked up."""
    try:
        expanded = Path(path).expanduser()
        expanded.exists()
    # a name that is too long, a folder without permission; the home of an unknown user
    except (OSError, RuntimeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError.at(key, f"cannot look for {path!r:.200}: {reason}") from error
    return expanded


def find_files(
    pattern: str, *, key: str = "dataset_path", cache: str = DEFAULT_CACHE
) -> list[Path]:
    """Return the files that one entry of the setting `key` names, sorted; of a URL its copies,
    which are made in `cache`.

    A token store appears once, as its `.idx` file. Empty files that a glob finds are left out.
    Raises DataError if there is no file, or one that is not read, or an empty one by its name.
    """
    if pattern.lower().startswith("hf://"):
        raise DataError.at(key, f"{pattern!r} names data on the Hugging Face Hub; {HUB}")
    if is_url(pattern):
        place = user_path(local_cache(cache), key="dataset_cache")
        pattern = fetch_files(pattern, cache=place, key=key)
    path = user_path(pattern, key=key)
    if (path / SAVED).is_file():
        return _saved(path, key=key)
    if path.is_dir():
        raise DataError.at(key, _folder_refusal(path, pattern))
    if Path(f"{path}.idx").exists():
        path = Path(f"{path}.idx")
    named = path.exists()
    found = [path] if named else [Path(p) for p in glob.glob(str(path), recursive=True)]
    # realpath: without it a chain of over 40 links would count as broken
    if broken := [p for p in found if p.is_symlink() and not exists(realpath(p))]:
        rule = (
            f"{min(broken)} is a link to {min(broken).readlink()}, where there is no file; restore "
            f"that, or remove the link"
        )
        raise DataError.at(key, rule)
    files = _without_links({_index_of(file) for file in found if file.is_file()})
    empty = {file for file in files if file.exists() and file.stat().st_size == 0}
    if not files:
        raise DataError.at(key, _nothing(found, pattern))
    for file in files:
        format_of(file)
    if empty and (named or len(empty) == len(files)):
        raise DataError.at(key, f"a file must not be empty: {min(empty)}; remove it")
    if empty:
        logger.warning(
            "%d of %s in %s are empty and left out",
            len(empty),
            amount(len(files), "file"),
            pattern,
        )
    return [file for file in files if file not in empty]


def find_all(entries: Iterable[str], *, cache: str, once: Once = alone) -> list[list[Path]]:
    """Return the files that each entry of `dataset_path` names, as `find_files` does."""
    named = once(lambda: [[*map(str, find_files(entry, cache=cache))] for entry in entries])
    return [[*map(Path, files)] for files in named]


def _saved(folder: Path, *, key: str) -> list[Path]:
    """Return the files of a dataset that the library `datasets` saved to a folder."""
    try:
        state = json.loads((folder / SAVED).read_bytes())
        files = [folder / file["filename"] for file in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        rule = f"{folder / SAVED} must list the files of a saved dataset: {error}; save it anew"
        raise DataError.at(key, rule) from error
    if missing := [file for file in files if not file.is_file()]:
        rule = f"{missing[0]} is missing, which {folder / SAVED} lists; save the dataset anew"
        raise DataError.at(key, rule)
    if not files:
        raise DataError.at(key, f"the saved dataset {folder} holds no rows; remove it")
    return files


def _without_links(files: set[Path]) -> list[Path]:
    """Return the files sorted, each once: a glob finds files again under links to folders."""
    kept: dict[Path, Path] = {}
    places = {file: file.resolve() for file in files}
    # a file before its links, then the shortest link
    for file in sorted(files, key=lambda file: (file != places[file], len(file.parts), file)):
        kept.setdefault(places[file], file)
    if len(kept) < len(files):
        logger.warning(
            "%s found again through links, each is read once",
            amount(len(files) - len(kept), "file"),
        )
    return sorted(kept.values())


def _index_of(file: Path) -> Path:
    return file.with_suffix(".idx") if file.suffix in STORES else file


def _nothing(found: list[Path], pattern: str) -> str:
    if found:
        others = "folders" if found[0].is_dir() else "special files"
        return f"{pattern!r} matches {others}; name files, or a glob into folders: **/*.jsonl"
    hints = "".join(f"; {hint}" for part, hint in HINTS.items() if part in pattern)
    return f"no file matches {pattern!r:.200}; relative paths begin at {Path.cwd()}{hints}"


def _folder_refusal(folder: Path, pattern: str) -> str:
    """Say which files of a folder globs would take, and which they would not."""
    paths = islice((path for path in folder.rglob("*") if path.is_file()), MOST_LOOKED_AT)
    taken: Counter[str] = Counter()
    left_out: list[str] = []
    for path in sorted(paths):
        # one glob for each store
        if path.suffix == ".bin" and path.with_suffix(".idx").exists():
            continue
        if suffix_of(path) not in READ or not path.suffix:
            left_out.append(path.relative_to(folder).as_posix())
        else:
            packed = path.suffix if path.suffix.lower() in PACKED else ""
            taken[Path(path.name.removesuffix(packed)).suffix + packed] += 1
    if splits := sorted(saved.parent.name for saved in folder.glob(f"*/{SAVED}")):
        return (
            f"{pattern!r} holds several saved datasets: {_listed(splits)}; name one, as "
            f"{folder / splits[0]}"
        )
    says = f"must name files, {pattern!r} is a folder"
    if not taken and not left_out:
        return f"{says} without files"
    lists = f"{_listed(left_out)} ({amount(len(left_out), 'file')})"
    if not taken:
        return f"{says} in which no file has a suffix that can be read: {lists}"
    globs = (
        f"{folder.as_posix()}/**/*{suffix} ({amount(number, 'file')})"
        for suffix, number in sorted(taken.items())
    )
    rest = f"; these leave out {lists}" if left_out else ""
    return f"{says}; name globs: {', '.join(globs)}{rest}"


def _listed(names: Iterable[str]) -> str:
    shown = [*islice(names, MOST_NAMED + 1)]
    return ", ".join(shown[:MOST_NAMED]) + (" ..." if len(shown) > MOST_NAMED else "")


def divide(files: Iterable[Path]) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return the files to tokenise, and the prefixes of token stores."""
    texts, stores = [], []
    for file in files:
        if file.suffix in STORES:
            stores.append(file.with_suffix(""))
        else:
            texts.append(file)
    return tuple(texts), tuple(stores)
