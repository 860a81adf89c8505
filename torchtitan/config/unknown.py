"""Names that no setting has: what may have been meant.

The file of other trainers' names has name = "section.key: note", or a sentence.
"""

from __future__ import annotations

import difflib
import functools
import pathlib
from collections.abc import Mapping
from dataclasses import is_dataclass
from typing import Any

from torchtitan.config.foreign import Foreign
from torchtitan.config.schema import Path, keys, sections
from torchtitan.config.sources import COMMAND_LINE, Setting, header, parse, spell


def describe_unknown(
    path: Path, setting: Setting, *, tree: type, tables: set[Path], foreign: Foreign
) -> str:
    """Return what is wrong with a key that the tree lacks, and what may have been meant.

    Args:
        path: The key.
        setting: Its value and place.
        tree: The settings.
        tables: All sections, those of foreign keys included.
        foreign: Names of other programs.
    """
    origin, where, known = setting.origin, setting.where(), keys(tree)
    for end in range(1, len(path)):
        if path[:end] in known:
            name = spell(path[:end], origin=origin)
            if not is_dataclass(known[path[:end]].item):
                return f"{where}: {name} is a value, not a table"
            is_option = origin == COMMAND_LINE
            form = f"{name} '[{{key = value}}]'" if is_option else f"[{header(path[:end])}]"
            place = where if is_option else origin  # one message per table
            return f"{place}: {name} is a list of tables; write {form}"
    is_empty_table = len(path) == 1 and setting.value == {}
    parent, name = (path, "") if is_empty_table else (path[:-1], path[-1])
    is_new_table = bool(parent) and parent not in tables
    table = None
    if is_new_table:
        table = _closest(".".join(parent), {".".join(table): table for table in tables})
    intended = (*table, name) if table is not None and (*table, name) in known else None
    answer = _answer(path, origin=origin, tree=tree, file=foreign.other_trainers)
    if answer is not None and intended is None:
        return f"{where}: {answer}"
    if path in tables:
        form = spell((*path, "key"), origin=origin)
        return f"{where}: {header(path)} is a section, not a key; write {form} ..."
    switch = (*parent, name.replace("-", "_").removeprefix("no_"))
    rule = f"{header(parent)} has no key {name!r}" if parent else "has no section"
    if switch in known and name.startswith(("no-", "no_")):  # torchtitan's --section.no-key
        return f"{where}: {rule}; write {spell(switch, origin=origin)} false"
    if is_new_table:
        rule = f"unknown section {header(parent)}"
        guess = intended or table
        if origin != COMMAND_LINE:
            where, guess = origin, table  # one message per section
    else:
        # a key of another section by this very name is the most frequent slip
        by_name = {one[-1]: one for one in reversed([*known])}
        by_name |= {one[-1]: one for one in (*foreign.names, *known) if one[:-1] == parent}
        guess = _closest(name, by_name)
    if guess is not None:
        meant = header(guess) if guess in tables else spell(guess, origin=origin)
        return f"{where}: {rule}; did you mean {meant}?"
    for paths in (known, foreign.names):
        if names := [one[-1] for one in paths if one[:-1] == parent]:
            return f"{where}: {rule}; valid are {', '.join(names)}"
    names = [*map(header, sections(tree)), "the sections of custom modules"]
    return f"{where}: {rule}; valid are {', '.join(names)}"


def _answer(path: Path, *, origin: str, tree: type, file: pathlib.Path | None) -> str | None:
    """Return what to write instead of another trainer's name, with or without a section."""
    answers = {} if file is None else read_answers(file)
    dotted = ".".join(path).replace("-", "_")
    answer = answers.get(dotted) or answers.get(dotted.split(".")[-1])
    if answer is None:
        return None
    key, _, note = answer.partition(": ")
    new = tuple(key.split("."))
    if new not in keys(tree):
        return f"is not a setting here: {answer}"
    note = f" ({note})" if note else ""
    return f"is not a key here; write {spell(new, origin=origin)}{note}"


@functools.cache
def read_answers(file: pathlib.Path) -> Mapping[str, str]:
    """Return what to write here, by names of other trainers."""
    answers: Any = parse(file.read_text("utf-8"), origin=str(file))
    return answers


def _closest(word: str, names: Mapping[str, Path]) -> Path | None:
    close = difflib.get_close_matches(word, names, n=1, cutoff=0.65)
    return names[close[0]] if close else None
