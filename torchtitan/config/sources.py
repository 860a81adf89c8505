"""Where settings are written: TOML files with a base, the command line, and TOML again.

Every source becomes a layer, a flat dictionary from a key's path to its value and where it stands.
"Tables merge, values replace" is then one `dict.update`, and an error can name the place.

`base = "other.toml"` at the top of a file reads that file first. It names one file, relative to
its own: with two, readers would have to guess which one wins.
"""

from __future__ import annotations

import os
import pathlib
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import tomli_w

from torchtitan.base.errors import ConfigError
from torchtitan.base.urls import hide_credentials
from torchtitan.config.schema import (
    Key,
    Path,
    as_table,
    keys,
    literal,
    values_of,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

CONFIG_FILE: Path = ("job", "config_file")
"""Names the file to read. It is valid on the command line only."""
COMMAND_LINE = "command line"
PYTHON = "load_config(...)"
NUM_SHOWN = 100  # characters of a value that a message repeats
HELP = ("-h", "--help")
OPTION = re.compile(r"--[\w.-]+(=|\Z)|-[^\d.\s]\S*\Z")


@dataclass(frozen=True)
class Setting:
    """One value as it was given.

    Args:
        origin: File, `COMMAND_LINE` or `PYTHON`.
        written: Path of the key as it was written, perhaps by an old name.
        given: The value as it was written.
        problem: Rule that it breaks, if it could not be read.
    """

    value: object
    origin: str
    written: Path
    given: str
    problem: str = ""

    @property
    def is_in_file(self) -> bool:
        """Whether it comes from a file."""
        return self.origin not in (COMMAND_LINE, PYTHON)

    def where(self) -> str:
        """Place, key and value, with which every message about it starts."""
        given = hide_credentials(self.given.replace("\n", "\\n"))
        shown = given if len(given) <= NUM_SHOWN else given[:NUM_SHOWN] + " ..."
        joint = " " if self.origin == COMMAND_LINE else " = "
        return f"{self.origin}: {spell(self.written, origin=self.origin)}{joint}{shown}".rstrip()


Layer = dict[Path, Setting]


@dataclass
class Report:
    """Mistakes and notices, collected while settings are checked."""

    mistakes: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


def spell(path: Path, *, origin: str) -> str:
    """Write a key: `--training.steps` on the command line, `[training] steps` elsewhere."""
    if origin == COMMAND_LINE:
        return "--" + ".".join(path)
    return f"{header(path[:-1])} {path[-1]}" if len(path) > 1 else path[0]


def header(path: Path) -> str:
    """Write the header of a section."""
    return f"[{'.'.join(path)}]"


def flatten(table: Mapping[str, object], *, origin: str, prefix: Path = ()) -> Layer:
    """Return nested tables as a layer. An empty table is kept as the value {}."""
    layer: Layer = {}
    for key, value in table.items():
        path = (*prefix, key)
        if isinstance(value, dict) and value:
            layer |= flatten(value, origin=origin, prefix=path)
        else:
            layer[path] = Setting(value, origin, path, literal(value))
    return layer


# --- files -------------------------------------------------------------------------------------


def read_layers(file: Setting) -> list[Layer]:
    """Read a file and its bases. The outermost base comes first.

    Raises:
        ConfigError: A file is missing, is not TOML, or inherits from itself.
    """
    layers: list[Layer] = []
    seen: list[pathlib.Path] = []
    current: Setting | None = file
    while current is not None:
        path = pathlib.Path(str(current.value)).expanduser()
        if current.is_in_file:
            path = pathlib.Path(os.path.normpath(pathlib.Path(current.origin).parent / path))
        is_circle = path.resolve() in (one.resolve() for one in seen)
        seen.append(path)
        if is_circle:
            circle = " -> ".join(map(str, seen))
            raise ConfigError(f"{current.where()}: files must not inherit in a circle ({circle})")
        origin = str(path)
        table = parse(_read_text(path, named_by=current), origin=origin)
        base = table.pop("base", None)
        layers.insert(0, flatten(table, origin=origin))
        current = None if base is None else Setting(base, origin, ("base",), literal(base))
        if current is not None and not (isinstance(base, str) and base):
            rule = 'must name one file, as in base = "other.toml"'
            raise ConfigError(f"{current.where()}: {rule}")
    return layers


def parse(text: str, *, origin: str) -> dict[str, object]:
    """Parse TOML; raises ConfigError with the line."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError; integers of > 4300 digits
        found = re.search(r"at line (\d+)", str(error))
        lines = text.splitlines()
        number = int(found[1]) if found else max(len(lines), 1)
        shown = lines[number - 1].strip()[:NUM_SHOWN] if number <= len(lines) else ""
        raise ConfigError(f"{origin}, line {number}: not valid TOML: {error}: {shown!r}") from error


def to_toml(config: object, *, only_changed: bool = False) -> str:
    """Write resolved settings. Loading them gives an equal tree, but for the file's name.

    Args:
        only_changed: Leave out settings that have their default.
    """
    tables: dict[str, Any] = {}
    known = keys(type(config))
    for path, value in values_of(config).items():
        is_default = only_changed and value == known[path].default
        if value is None or path == CONFIG_FILE or is_default:
            continue
        table = tables
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = as_table(value)
    return tomli_w.dumps(tables)


def _read_text(path: pathlib.Path, *, named_by: Setting) -> str:
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        problem = f"no such file: {path} (looked from {pathlib.Path.cwd()})"
    except UnicodeDecodeError as error:
        problem = f"{path} is not UTF-8 (byte {error.start})"
    except (OSError, ValueError) as error:
        problem = f"{path} cannot be read ({error})"
    raise ConfigError(f"{named_by.where()}: {problem}")


# --- the command line --------------------------------------------------------------------------


def parse_command_line(
    argv: Sequence[str] | Layer, *, tree: type, renamed: Mapping[Path, Path]
) -> tuple[Layer, list[str]]:
    """Split words into settings. Names and types are checked later, together with those of files.

    Args:
        argv: Words, or settings given in Python, which are returned.
        renamed: Today's path by each old one.

    Returns:
        The settings, and a mistake for each word that belongs to no option.
    """
    if isinstance(argv, dict):
        return argv, []
    layer: Layer = {}
    mistakes = []
    words = list(argv)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            remedy = ""
            if word.startswith("-"):
                remedy = f"; a value that starts with - is written --section.key={word}"
            elif word.endswith(".toml"):
                remedy = f"; write {spell(CONFIG_FILE, origin=COMMAND_LINE)} {word}"
            mistakes.append(f"{COMMAND_LINE}: {word!r} belongs to no option{remedy}")
            continue
        name, has_value, value = word[2:].partition("=")
        path = tuple(name.split("."))
        key = keys(tree).get(renamed.get(path, path))
        given = [value] if has_value else []
        takes_all = key is None or key.kind is tuple
        while words and not OPTION.match(words[0]) and not has_value and (takes_all or not given):
            given.append(words.pop(0))
        layer[path] = _read_option(path, words=given, key=key)
    return layer, mistakes


def _read_option(path: Path, *, words: Sequence[str], key: Key | None) -> Setting:
    """Return the setting of one option. Without words its value is true."""
    given, problem = " ".join(words), ""
    if not words and key is not None and key.kind is not bool:
        problem = f"needs a value ({key.type_text})"
    try:
        given.encode()
    except UnicodeEncodeError:  # the resolved TOML could not hold it
        given, problem = given.encode(errors="backslashreplace").decode(), "must be UTF-8"
    if key is None or (key.kind is tuple and key.item is str and not key.is_nested):
        # also a,b, as in torchtitan's docs; quotes, brackets and slashes keep a comma
        words = [part for word in words for part in _split_at_commas(word)]
    values = [_read_word(word, key=key) for word in words] or [True]
    value = values if len(values) > 1 else values[0]
    return Setting(value, COMMAND_LINE, path, given, problem)


def _split_at_commas(word: str) -> list[str]:
    return [word] if set(word) & set("[]{}\"'/") else [part.strip() for part in word.split(",")]


def _read_word(word: str, *, key: Key | None) -> object:
    """Return the TOML value of a word, or the word itself where a string is due."""
    if word.lower() == "none" and (key is None or key.unset_by_none):
        return None
    if word in ("True", "False") and key is not None and key.item is bool:
        word = word.lower()
    try:
        table = parse(f"value = {word}", origin=COMMAND_LINE)
    except ConfigError:
        return word
    value = table["value"] if len(table) == 1 else word
    if key is None or key.item is not str:
        return value
    # flavor = 20 is the string "20"; quotes and lists are read as TOML
    return value if isinstance(value, (str, list) if key.kind is tuple else str) else word
