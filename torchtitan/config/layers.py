"""Raw settings with their origin: the form in which every file and the command line are merged.

A layer is a flat dictionary from a key's path, ("training", "dataloader", "num_workers"), to what
was written there and where. Flat, because "tables merge, values replace" is then one `dict.update`,
and every later step (old spellings, unknown names, types) can say which file holds the mistake.
The alternative, validating the merged nested tables, would only know that some file is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass

from torchtitan.base.urls import hide_credentials

Path = tuple[str, ...]

CONFIG_FILE: Path = ("job", "config_file")
"""Names the file to read, so it stands on the command line alone."""
COMMAND_LINE = "command line"
PYTHON = "load_config(...)"
NUM_SHOWN = 100  # characters of a value that a message repeats
MAX_BITS = 64 * 200  # Python writes no decimal number of more than 4300 digits


@dataclass(frozen=True)
class Setting:
    """One value as it was given: read, verbatim, and where; `problem` if it could not be read."""

    value: object
    origin: str
    written: Path
    given: str
    problem: str = ""

    @property
    def is_in_file(self) -> bool:
        """Whether a file says it, not whoever starts the job."""
        return self.origin not in (COMMAND_LINE, PYTHON)

    def where(self) -> str:
        """Say place, key and value, as every message about it begins."""
        given = self.given.replace("\n", "\\n")  # a message is one line
        given = hide_credentials(given)
        shown = given if len(given) <= NUM_SHOWN else given[:NUM_SHOWN] + " ..."
        joint = " " if self.origin == COMMAND_LINE else " = "
        return f"{self.origin}: {spell(self.written, origin=self.origin)}{joint}{shown}".rstrip()


Layer = dict[Path, Setting]


@dataclass
class Findings:
    """What is said of a job's settings, as one stage after the other finds it."""

    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def spell(path: Path, *, origin: str) -> str:
    """Write a key as its reader would: `[training] steps` in a file, `--training.steps` else."""
    if origin == COMMAND_LINE:
        return "--" + ".".join(path)
    return f"{section(path[:-1])} {path[-1]}" if len(path) > 1 else path[0]


def section(path: Path) -> str:
    """Write a section as a TOML header."""
    return f"[{'.'.join(path)}]"


def flatten(table: Mapping[str, object], *, origin: str, prefix: Path = ()) -> Layer:
    """Turn nested tables into a layer; an empty table stays as the value {}, to be checked too."""
    layer: Layer = {}
    for key, value in table.items():
        path = (*prefix, key)
        if isinstance(value, dict) and value:
            layer |= flatten(value, origin=origin, prefix=path)
        else:
            layer[path] = Setting(value, origin, path, literal(value))
    return layer


def same(left: object, right: object) -> bool:
    """Compare two raw values; 1 is 1.0, as TOML writers mean it, but true is not 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def as_table(value: object) -> object:
    """Turn a value into what TOML writes: lists, and tables without what is not set."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in fields(value)}
    if isinstance(value, dict):
        return {key: as_table(item) for key, item in value.items() if item is not None}
    return [as_table(item) for item in value] if isinstance(value, (list, tuple)) else value


def literal(value: object) -> str:
    """Write a value as TOML would."""
    if value is None:
        return "none"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(literal, value))}]"
    if is_dataclass(value):
        value = as_table(value)
    if isinstance(value, dict):
        return (
            "{" + ", ".join(f"{_key(key)} = {literal(item)}" for key, item in value.items()) + "}"
        )
    if isinstance(value, int) and value.bit_length() > MAX_BITS:
        return hex(value)
    return str(value)


def _key(key: str) -> str:
    """Write a key as TOML would, in quotes where that is needed."""
    bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if bare else literal(key)
