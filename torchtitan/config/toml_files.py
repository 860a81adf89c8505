"""Read a TOML file and those that it inherits from, and write one.

`base = "other.toml"` at the top of a file, relative to that file, reads the other one first. One
base and not a list: a chain has one order, so that nobody has to guess which of two files wins.
tomllib tells the place of a mistake in its message; the line itself is added, since that is what
the eye looks for.
"""

from __future__ import annotations

import difflib
import os
import pathlib
import re
import sys
from typing import Any

import tomli_w

from torchtitan.base.errors import ConfigError
from torchtitan.config.fields import fields, values_of
from torchtitan.config.layers import (
    COMMAND_LINE,
    CONFIG_FILE,
    NUM_SHOWN,
    Layer,
    Setting,
    as_table,
    flatten,
    literal,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]


def read_layers(file: Setting) -> list[Layer]:
    """Read the file that `file` names, after its bases: the first layer is the outermost base.

    Raises ConfigError when one is missing, no TOML, or inherits from itself.
    """
    layers: list[Layer] = []
    seen: list[pathlib.Path] = []
    names: list[str] = []
    current: Setting | None = file
    while current is not None:
        path = _path_of(current)
        names.append(str(path))
        if path.resolve() in seen:
            circle = " -> ".join(names)
            raise ConfigError(
                f"{current.where()}: files must not inherit in a circle ({circle}); "
                "remove one `base`"
            )
        seen.append(path.resolve())
        table = parse(_text_of(path, named_by=current), origin=str(path))
        base = table.pop("base", None)
        try:
            layers.insert(0, flatten(table, origin=str(path)))
        except RecursionError as error:
            raise ConfigError(
                f"{path}: tables must not be nested more deeply than the settings are; remove the "
                "one with the longest name"
            ) from error
        current = _base_of(base, origin=str(path))
    return layers


def parse(text: str, *, origin: str) -> dict[str, object]:
    """Parse TOML; raises ConfigError with the line."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError; integers of > 4300 digits
        found = re.search(r"at line (\d+)", str(error))
        lines = text.splitlines()
        number = int(found[1]) if found else max(len(lines), 1)
        shown = lines[number - 1].strip() if number <= len(lines) else ""
        if len(shown) > NUM_SHOWN:
            shown = shown[:NUM_SHOWN] + " ..."
        raise ConfigError(f"{origin}, line {number}: not valid TOML: {error}: {shown!r}") from error


def read_value(text: str) -> object:
    """Return the TOML value that a text is, or the text itself where it is none."""
    try:
        table = parse(f"value = {text}", origin=COMMAND_LINE)
    except ConfigError:
        return text
    return table["value"] if len(table) == 1 else text


def to_toml(config: object, *, only_changed: bool = False) -> str:
    """Write resolved settings; loading them gives an equal tree but for the file's name.

    `only_changed` leaves out those that have their default.
    """
    tables: dict[str, Any] = {}
    facts = fields(type(config))
    for path, value in values_of(config).items():
        if value is None or path == CONFIG_FILE:
            continue
        if only_changed and value == facts[path].default:
            continue
        table = tables
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = as_table(value)
    return tomli_w.dumps(tables)


def _base_of(base: object, *, origin: str) -> Setting | None:
    if base is None:
        return None
    setting = Setting(base, origin, ("base",), literal(base))
    if not isinstance(base, str) or not base:
        raise ConfigError(f'{setting.where()}: must name one file, as in base = "other.toml"')
    return setting


def _path_of(named_by: Setting) -> pathlib.Path:
    """Where the file lies: a base beside the file that names it, config_file as the shell sees."""
    path = pathlib.Path(str(named_by.value)).expanduser()
    if not named_by.is_in_file:
        return path
    return pathlib.Path(os.path.normpath(pathlib.Path(named_by.origin).parent / path))


def _text_of(path: pathlib.Path, *, named_by: Setting) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError as error:
        raise ConfigError(f"{named_by.where()}: there is no file {path}{_nearest(path)}") from error
    except (OSError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            rule = f"is not UTF-8 (byte {error.start}); save it as UTF-8"
        else:
            rule = f"cannot be read ({error})"
        raise ConfigError(f"{named_by.where()}: {path} {rule}") from error


def _nearest(path: pathlib.Path) -> str:
    siblings = [str(other) for other in path.parent.glob("*.toml")]
    near = difflib.get_close_matches(str(path), siblings, n=1)
    return f"; did you mean {near[0]}?" if near else f" (looked from {pathlib.Path.cwd()})"
