"""Names that no setting has: what may have been meant.

The file of other trainers' names has name = "section.key: note", or a sentence.
"""

from __future__ import annotations

import difflib
import functools
import pathlib
from collections.abc import Mapping
from typing import Any

from torchtitan.config.foreign import Foreign
from torchtitan.config.schema import Path, keys
from torchtitan.config.sources import Setting, header, parse, spell


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
        if value := known.get(path[:end]):
            return f"{where}: {spell(path[:end], origin=origin)} is {value.type_text}, not a table"
    if answer := _answer(path, origin=origin, tree=tree, file=foreign.other_trainers):
        return f"{where}: {answer}"
    if path in tables:
        form = spell((*path, "key"), origin=origin)
        return f"{where}: {header(path)} is a section, not a key; write {form} ..."
    parent, name = path[:-1], path[-1]
    rule = f"unknown section {header(parent)}" if parent else "has no section"
    if parent in tables:
        rule = f"{header(parent)} has no key {name!r}"
    # a key of another section by this very name is the most frequent slip
    by_name = {one[-1]: one for one in reversed([*known])}
    by_name |= {one[-1]: one for one in (*foreign.names, *known) if one[:-1] == parent}
    if close := difflib.get_close_matches(name, by_name, n=1, cutoff=0.65):
        return f"{where}: {rule}; did you mean {spell(by_name[close[0]], origin=origin)}?"
    valid = [one[-1] for one in known if one[:-1] == parent]
    return f"{where}: {rule}" + (f"; valid are {', '.join(valid)}" if valid else "")


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
