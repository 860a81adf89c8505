"""Settings: a tree of frozen dataclasses, read from TOML files and `--section.key VALUE` options.

Every source is a layer, a flat dictionary from a key's path to its value and origin. A later source
wins by `dict.update`, and an error names the origin. All mistakes are reported together.

An annotation is a scalar, a Literal, `T | None`, `dict[str, T]`, `tuple[T, ...]`, which also takes
a single value, or `tuple[SomeDataclass, ...]`, a list of tables. `Annotated` adds a `Range`,
functions that raise ValueError, `Parse`, `Requires` and `Replaces`. Conversion is strict: 2.5 is no
integer.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import logging
import math
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, field, is_dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar, runtime_checkable

import tomli_w

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import ConfigError, Violation, did_you_mean, printable
from torchtitan.base.urls import hide_credentials, is_url, url_problem

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # type: ignore[import-not-found, unused-ignore]

logger = logging.getLogger(__name__)
T = TypeVar("T")
Path = tuple[str, ...]
MAX_INT = 10**12
"""Largest integer of a key without an upper bound, so that derived sizes fit into 64 bits."""
CONFIG_FILE: Path = ("job", "config_file")
"""Names the file to read. It is valid on the command line only."""
COMMAND_LINE, PYTHON = "command line", "load_config(...)"
MAX_SHOWN = 100  # characters of a value that a message repeats
OPTION = re.compile(r"--[\w.-]+(=|\Z)|-[^\d.\s]\S*\Z")

# --- annotations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Range:
    """Bounds of a number."""

    gt: float | None = None
    ge: float | None = None
    lt: float | None = None
    le: float | None = None

    def __call__(self, value: float) -> None:
        """Raise ValueError if a number is out of range."""
        gt, ge, lt, le = self.gt, self.ge, self.lt, self.le
        is_high_enough = (gt is None or value > gt) and (ge is None or value >= ge)
        if not (is_high_enough and (lt is None or value < lt) and (le is None or value <= le)):
            raise ValueError(f"must be {self}")

    def __str__(self) -> str:
        bounds = {">": self.gt, ">=": self.ge, "<": self.lt, "<=": self.le}
        return " and ".join(f"{sign} {n:.15g}" for sign, n in bounds.items() if n is not None)


@dataclass(frozen=True)
class Condition:
    """A condition on the value of a key. `text` describes it, with the key in place of {}."""

    text: str
    holds: Callable[[Any], bool]


def has_value(value: object) -> bool:
    """Return whether a value is neither None nor empty."""
    return value not in (None, (), [], {}, "")


GIVEN = Condition("{}", has_value)
IMPORT_PATH = Condition("{} = package.module:NAME", is_import_path)
ENABLED = Condition("{} >= 1", lambda value: isinstance(value, int) and value >= 1)


@dataclass(frozen=True)
class Requires:
    """Another setting that a key requires once it differs from its default.

    momentum: Annotated[float, Requires("name", "SGD")] = 0.0

    Args:
        key: Key of the same section, or a dotted path from the top.
        wanted: Required value, a tuple of alternatives, or a condition.
        of: Values of the key that require it. Default: all but its default.
        is_notice: Without it the key has no effect, and the job starts with a notice.
    """

    key: str
    wanted: object
    remedy: str = "set that, or remove this"
    of: tuple[object, ...] = ()
    is_notice: bool = False

    @property
    def text(self) -> str:
        """The requirement: `name = "SGD"`, `rank >= 1`, `initial_load_path`."""
        if isinstance(self.wanted, Condition):
            return self.wanted.text.format(self.key)
        return f"{self.key} = {' or '.join(map(literal, self._alternatives))}"

    def is_met_by(self, value: object) -> bool:
        """Return whether a value of the other setting is a required one."""
        if isinstance(self.wanted, Condition):
            return self.wanted.holds(value)
        return any(same(value, wanted) for wanted in self._alternatives)

    @property
    def _alternatives(self) -> tuple[object, ...]:
        return self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)


class Replaces:
    """Keys of the same section that this key replaces. In files, the later choice wins."""

    def __init__(self, *keys: str) -> None:
        self.keys = keys


@dataclass(frozen=True)
class Parse:
    """A function that is applied to a value before its type is checked."""

    function: Callable[[object], object]


class ImportPath:
    """A string that is one of `names`, or the import path of custom code.

    Args:
        names: Built-in choices.
        any_name: Whether any other string is left to a later check.
    """

    def __init__(self, *names: str, any_name: bool = False) -> None:
        self.names, self._any_name = names, any_name

    def __call__(self, value: str) -> None:
        """Raise ValueError if it is neither."""
        if value not in self.names and not self._any_name and not is_import_path(value):
            names = f"one of {', '.join(self.names)}, or " if self.names else ""
            rule = f"must be {names}an import path, my_package.my_module:NAME"
            raise ValueError(f"{rule}{did_you_mean(value, self.names)}")


def named_or_number(*names: str) -> Callable[[str], None]:
    """Return a check for one of the names, or a positive integer in digits."""

    def check(value: str) -> None:
        is_number = value.isascii() and value.isdecimal() and 0 < len(value.lstrip("0")) < 10
        if value not in names and not is_number:
            rule = f'must be {", ".join(names)} or a positive integer in quotes, such as "2"'
            raise ValueError(f"{rule}{did_you_mean(value, names)}")

    return check


def _object_table(value: object) -> object:
    return {"path": value} if isinstance(value, str) else value


def check_object(value: Mapping[str, object]) -> None:
    """Check for a table with an import path."""
    if not is_import_path(value.get("path")):
        raise ValueError('must be {path = "my_package.my_module:NAME", ...}')


def _check_text(value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def finite(value: float) -> None:
    """Check for a finite number."""
    if not math.isfinite(value):
        raise ValueError("must be a finite number")


def _check_local(value: str) -> None:
    if is_url(value):
        raise ValueError("must be a path, not a URL")


def path_or_url(value: str) -> None:
    """Check for a path, or a URL of a supported store."""
    if is_url(value) and (problem := url_problem(value)):
        raise ValueError(problem)


def inside_dump_folder(value: str) -> None:
    """Check for a path that lies inside job.dump_folder."""
    _check_local(value)
    if os.path.isabs(value) or os.path.normpath(value).split(os.sep)[0] == "..":
        raise ValueError("must lie inside job.dump_folder; write a relative path")


def _check_minus_one_or_more(value: int) -> None:
    if value != -1 and value < 1:
        raise ValueError("must be -1 or at least 1")


Options = dict[str, Any]
"""Keyword arguments of a custom object."""
CustomObject = Annotated[Options, Parse(_object_table), check_object]
"""A table with the import path of a class and its keyword arguments, or the path alone."""
Text = Annotated[str, _check_text]
LocalPath = Annotated[Text, _check_local]
PathOrURL = Annotated[Text, path_or_url]
PositiveInt = Annotated[int, Range(gt=0)]
NonNegativeInt = Annotated[int, Range(ge=0)]
MinusOneOrMore = Annotated[int, _check_minus_one_or_more]
FinitePositive = Annotated[float, finite, Range(gt=0)]
FiniteNonNegative = Annotated[float, finite, Range(ge=0)]
Fraction = Annotated[float, Range(ge=0, le=1)]

# --- values ------------------------------------------------------------------------------------

SCALARS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
UNIONS = (typing.Union, types.UnionType)


def convert(value: object, annotation: Any) -> Any:
    """Return a TOML value as the type of an annotation.

    Raises:
        ValueError: States the rule that the value breaks.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        for item in arguments[1:]:
            value = item.function(value) if isinstance(item, Parse) else value
        value = convert(value, arguments[0])
        checks = [check for check in arguments[1:] if callable(check) and value is not None]
        for check in checks:
            check(value)
        return value
    if origin in UNIONS:
        return None if value is None else convert(value, arguments[0])
    if origin is Literal:
        if value not in arguments:
            guess = did_you_mean(str(value), arguments)
            raise ValueError(f"must be one of {', '.join(arguments)}{guess}")
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(
            _convert_item(item, arguments[0], name=number) for number, item in enumerate(items, 1)
        )
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError("must be a table")
        return {
            convert(key, arguments[0]): _convert_item(item, arguments[1], name=literal(key))
            for key, item in value.items()
        }
    if is_dataclass(annotation):
        return _convert_table(value, annotation)
    if annotation is Any:
        return value
    if annotation is float and type(value) is int:
        return float(value) if abs(value) < 1e300 else math.inf
    is_text = annotation is str and isinstance(value, str)  # a StoredPath is one
    if type(value) is not annotation and not is_text:
        raise ValueError(f"must be {SCALARS[annotation]}")
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        raise ValueError("must be UTF-8 without the character NUL (\\u0000)")
    return value


def _convert_item(value: object, annotation: Any, *, name: object) -> Any:
    try:
        return convert(value, annotation)
    except ValueError as error:
        raise ValueError(f"item {name}: {error}") from error


def _convert_table(value: object, cls: Any) -> Any:
    if isinstance(value, cls):  # a default, or from Python
        return value
    if not isinstance(value, dict):
        raise ValueError("must be a table, {key = value}")
    names = [name for (name,) in keys(cls)]
    if unknown := [name for name in value if name not in names]:
        guess = did_you_mean(unknown[0], names) or f"; valid keys are {', '.join(names)}"
        raise ValueError(f"has no key {unknown[0]!r}{guess}")
    values = {}
    for (name,), key in keys(cls).items():
        if name in value:
            try:
                values[name] = key.convert(value[name])
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
        elif key.default is MISSING:
            raise ValueError(f"needs the key {name}")
    return cls(**values)


def same(left: object, right: object) -> bool:
    """Compare two TOML values. 1 equals 1.0, but not true."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def as_table(value: object) -> object:
    """Return a value as TOML writes it: lists, and tables without keys that are None."""
    if is_dataclass(value):
        value = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_table(item) for key, item in value.items() if item is not None}
    return [as_table(item) for item in value] if isinstance(value, list | tuple) else value


def literal(value: object) -> str:
    """Write a value as TOML does, and None as `none`."""
    value = as_table(value)
    if isinstance(value, dict):
        is_bare = re.compile(r"[\w-]+", re.ASCII).fullmatch
        items = (f"{k if is_bare(k) else literal(k)} = {literal(v)}" for k, v in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, str | bool):
        return json.dumps(value, ensure_ascii=False)
    return "none" if value is None else str(value)


# --- keys --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One key of a tree."""

    field: dataclasses.Field[Any]
    annotation: Any
    section: type
    """The class with the field."""

    def convert(self, value: object) -> Any:
        """Return a TOML value as the key's type; raises ValueError with the rule it breaks."""
        converted = convert(value, self.annotation)
        ranges = [check for check in self.metadata if isinstance(check, Range)]
        is_bounded = any(check.lt is not None or check.le is not None for check in ranges)
        if isinstance(converted, int) and not is_bounded and abs(converted) > MAX_INT:
            raise ValueError(f"must be at most {MAX_INT}")
        return converted

    @property
    def default(self) -> Any:
        """The default, or `dataclasses.MISSING`."""
        factory = self.field.default_factory
        return self.field.default if factory is MISSING else factory()

    @functools.cached_property
    def layers(self) -> list[tuple[Any, tuple[Any, ...]]]:
        """Origin and arguments of the annotation and of those inside it, the scalar last."""
        layers, inner = list[tuple[Any, tuple[Any, ...]]](), self.annotation
        while (origin := typing.get_origin(inner)) is not None:
            arguments = typing.get_args(inner)
            layers.append((origin, arguments))
            inner = str if origin is Literal else arguments[origin is dict]
        return [*layers, (inner, ())]

    @functools.cached_property
    def kind(self) -> type:
        """str, int, float, bool, tuple or dict."""
        kinds = (dict, tuple, self.item)
        return next(origin for origin, _ in self.layers if origin in kinds)

    @property
    def item(self) -> Any:
        """Innermost type: str, int, float, bool, Any, or the dataclass of a list of tables."""
        return self.layers[-1][0]

    @functools.cached_property
    def metadata(self) -> list[Any]:
        """Ranges, checks and requirements."""
        return [item for origin, args in self.layers if origin is Annotated for item in args[1:]]

    def replaced(self, path: Path) -> list[Path]:
        """Return the paths of the keys that this key at `path` replaces."""
        items = [item for item in self.metadata if isinstance(item, Replaces)]
        return [(*path[:-1], name) for item in items for name in item.keys]

    @functools.cached_property
    def takes_import_path(self) -> bool:
        """Whether it may name custom code."""
        return any(item is check_object or isinstance(item, ImportPath) for item in self.metadata)

    @functools.cached_property
    def is_nullable(self) -> bool:
        """Whether `none` on the command line restores its default."""
        is_optional = any(origin in UNIONS for origin, _ in self.layers)
        return is_optional or self.kind in (tuple, dict)


def _keys(tree: Any) -> Mapping[Path, Key]:
    paths, hints = dict[Path, Key](), typing.get_type_hints(tree, include_extras=True)
    for item in dataclasses.fields(tree):
        hint = hints[item.name]
        inner = keys(hint) if is_dataclass(hint) else {(): Key(item, hint, tree)}
        paths |= {(item.name, *path): key for path, key in inner.items()}
    return paths


def _sections(tree: Any) -> Mapping[Path, type]:
    paths = dict[Path, type]()
    for name, hint in typing.get_type_hints(tree).items():
        if is_dataclass(hint):
            paths[name,] = typing.cast(type, hint)
            paths |= {(name, *path): section for path, section in sections(hint).items()}
    return paths


keys: Callable[[Any], Mapping[Path, Key]] = functools.cache(_keys)
"""Returns every key of a tree by its path."""
sections: Callable[[Any], Mapping[Path, type]] = functools.cache(_sections)
"""Returns every section of a tree by its path, outer ones first."""


def value_at(config: object, path: Path) -> Any:
    """Return the section or value at a path."""
    return functools.reduce(getattr, path, config)


def values_of(config: object) -> dict[Path, object]:
    """Return every value of a tree by its path."""
    return {path: value_at(config, path) for path in keys(type(config))}


# --- sources -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A value, its origin (a file, `COMMAND_LINE` or `PYTHON`) and its path as it was written."""

    value: Any
    origin: str
    path: Path

    @property
    def is_in_file(self) -> bool:
        """Whether it comes from a file."""
        return self.origin not in (COMMAND_LINE, PYTHON)

    def where(self) -> str:
        """Origin, key and value, with which every message about it starts."""
        is_plain = self.origin == COMMAND_LINE and isinstance(self.value, str)
        text = self.value if is_plain else literal(self.value)
        text = hide_credentials(printable(text).replace("\n", "\\n"))
        text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
        equals = " " if self.origin == COMMAND_LINE else " = "
        return f"{self.origin}: {spell(self.path, origin=self.origin)}{equals}{text}"


Layer = dict[Path, Setting]


def spell(path: Path, *, origin: str = "") -> str:
    """Write a key: `--training.steps` on the command line, `[training] steps` elsewhere."""
    if origin == COMMAND_LINE:
        return "--" + ".".join(path)
    return f"{header(path[:-1])} {path[-1]}" if len(path) > 1 else path[0]


def header(path: Path) -> str:
    """Write the header of a section."""
    return f"[{'.'.join(path)}]"


def flatten(
    table: Mapping[str, object], *, origin: str, tree: Any = None, prefix: Path = ()
) -> Layer:
    """Return nested tables as a layer. A table of any keys of the tree stays one value."""
    layer: Layer = {}
    tree_keys = {} if tree is None else keys(tree)
    for name, value in table.items():
        path = (*prefix, name)
        is_value = path in tree_keys and tree_keys[path].kind is dict
        if isinstance(value, dict) and value and not is_value:
            layer |= flatten(value, origin=origin, tree=tree, prefix=path)
        else:
            layer[path] = Setting(value, origin, path)
    return layer


def parse(text: str, *, origin: str) -> dict[str, Any]:
    """Parse TOML; raises ConfigError with the line."""
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # TOMLDecodeError; integers of > 4300 digits
        raise ConfigError(f"{origin}: not valid TOML: {error}") from error


def read_files(file: Setting) -> dict[str, dict[str, Any]]:
    """Read a file and its bases, as tables by path. The outermost base comes first.

    `base = "other.toml"` at the top of a file reads that file first, relative to its own folder.

    Raises:
        ConfigError: A file is missing, is not TOML, or inherits from itself.
    """
    tables: dict[str, dict[str, Any]] = {}
    while True:
        path = FilePath(file.value).expanduser()
        if file.is_in_file:
            path = FilePath(os.path.normpath(FilePath(file.origin).parent / path))
        if path.resolve() in [FilePath(name).resolve() for name in tables]:
            circle = " -> ".join([*reversed(tables), str(path)])
            raise ConfigError(f"{file.where()}: files must not inherit in a circle ({circle})")
        try:
            text = path.read_bytes().decode("utf-8-sig")
        except (OSError, ValueError) as error:
            reason = f"cannot be read from {FilePath.cwd()}: {error}"
            raise ConfigError(f"{file.where()}: {reason}") from error
        table = parse(text, origin=str(path))
        base = table.pop("base", None)
        tables = {str(path): table, **tables}
        if base is None:
            return tables
        file = Setting(base, str(path), ("base",))
        if not (isinstance(base, str) and base):
            raise ConfigError(f'{file.where()}: must name one file, as in base = "other.toml"')


def parse_command_line(argv: Sequence[str], *, tree: type) -> tuple[Layer, list[str]]:
    """Return the settings of `--section.key VALUE ...`, and a mistake for each stray word.

    Names and types are checked later, together with those of files.
    """
    layer: Layer = {}
    mistakes, words = list[str](), list(argv)
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
        key = keys(tree).get(path)
        values = [value] if has_value else []
        takes_all = key is None or key.kind is tuple
        while words and not OPTION.match(words[0]) and not has_value and (takes_all or not values):
            values.append(words.pop(0))
        layer[path] = Setting(_read_words(values, key=key), COMMAND_LINE, path)
    return layer, mistakes


def _read_words(words: Sequence[str], *, key: Key | None) -> object:
    """Return the value of an option's words, which is true without any."""
    depth = 0 if key is None else [origin for origin, _ in key.layers].count(tuple)
    if key is None or (depth == 1 and key.item is str):
        # also a,b, as in torchtitan's docs; quotes, brackets and slashes keep a comma
        is_whole = [bool(set(word) & set("[]{}\"'/")) for word in words]
        parts = [[w] if whole else w.split(",") for w, whole in zip(words, is_whole, strict=True)]
        words = [word.strip() for word in itertools.chain(*parts)]
    values = [_read_word(word, key=key) for word in words] or [True]
    return values if len(values) > 1 else values[0]


def _read_word(word: str, *, key: Key | None) -> object:
    """Return the TOML value of a word, or the word itself where a string is due."""
    if word.lower() == "none" and (key is None or key.is_nullable):
        return None
    if word in ("True", "False") and key is not None and key.item is bool:
        word = word.lower()
    try:
        table = tomllib.loads(f"value = {word}")
    except (ValueError, RecursionError):
        return word
    value = table["value"] if len(table) == 1 else word
    if key is None or key.item is not str:
        return value
    # flavor = 20 is the string "20"; quotes and lists are read as TOML
    return value if isinstance(value, (str, list) if key.kind is tuple else str) else word


def to_toml(config: object, *, only_changed: bool = False) -> str:
    """Write resolved settings. Loading them gives an equal tree, but for the file's name.

    Args:
        only_changed: Leave out settings that have their default.
    """
    tables: dict[str, Any] = {}
    for path, key in keys(type(config)).items():
        value = value_at(config, path)
        if value is None or path == CONFIG_FILE or (only_changed and value == key.default):
            continue
        table = tables
        for name in path[:-1]:
            table = table.setdefault(name, {})
        table[path[-1]] = as_table(value)
    return tomli_w.dumps(tables)


# --- names of torchtitan 0.2 -------------------------------------------------------------------

OFF: tuple[object, ...] = (None, False, "", [], (), 0, 1, "none")
"""Values of a switch, list, number, degree or mode that is off."""


@dataclass(frozen=True)
class Refused:
    """A key of torchtitan 0.2, or a value of a key, that is not built here.

    Args:
        reason: Why, and what to write instead.
        accepts: Values that request nothing. Default: `OFF`.
        when: Key, and perhaps its value, without which this requests nothing.
    """

    reason: str
    accepts: tuple[object, ...] = ()
    when: tuple[str, ...] = ()


@dataclass(frozen=True)
class OldNames:
    """Names of torchtitan 0.2 that differ here, by dotted path."""

    renamed: Mapping[str, str] = field(default_factory=dict)
    refused: Mapping[str, Refused] = field(default_factory=dict)
    """Keys, or sections, that are not built."""
    values: Mapping[tuple[str, str], Refused] = field(default_factory=dict)
    """Values that are not built, by key and value."""

    def __contains__(self, path: Path) -> bool:
        return ".".join(path) in self.renamed or self.find(path, None) is not None

    def find(self, path: Path, value: object) -> Refused | None:
        """Return why a key or its value is refused."""
        names = [".".join(path[:end]) for end in range(len(path), 0, -1)]
        keys = (self.refused[name] for name in names if name in self.refused)
        values = (self.values.get((names[0], item)) for item in _as_list(value))
        return next(filter(None, (*keys, *values)), None)


def _as_list(value: object) -> list[Any]:
    items = value if isinstance(value, list | tuple) else [value]
    return [item for item in items if not isinstance(item, list | tuple | dict)]


# --- load --------------------------------------------------------------------------------------


@runtime_checkable
class HasRules(Protocol):
    """A section or a tree with rules between its keys."""

    def violations(self) -> Iterator[Violation]:
        """Yield each broken rule, with keys relative to the section."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """Loaded settings.

    Args:
        config: The tree.
        given: What files and command line hold, by today's names.
        notices: Remarks on settings without effect and on old names.
        old_file: The first file with a name of torchtitan 0.2.
    """

    config: T
    given: Layer
    notices: list[str]
    old_file: str | None

    @contextmanager
    def wording(self) -> Iterator[None]:
        """Add the origin of settings to a ConfigError that is raised inside."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError([_add_origin(m, self.given) for m in error.mistakes]) from error


def load(tree: type[T], argv: Sequence[str] | Layer, *, old_names: OldNames) -> Loaded[T]:
    """Read the file that `argv` names, apply its other options, and check everything.

    Args:
        tree: The settings.
        argv: Command line, or settings given in Python.
        old_names: Names of torchtitan 0.2.

    Raises:
        ConfigError: Lists every mistake.
    """
    options, mistakes = argv, list[str]()
    if not isinstance(options, dict):
        options, mistakes = parse_command_line(options, tree=tree)
    layers, is_read = list[Layer](), True
    if (file := options.get(CONFIG_FILE)) is not None and file.value is not None:
        try:
            tables = read_files(file)
            layers = [flatten(table, origin=name, tree=tree) for name, table in tables.items()]
        except ConfigError as error:
            mistakes += map(str, error.mistakes)
            is_read = False
    loaded, wrong = build(tree, [*layers, options], old_names=old_names, check_rules=is_read)
    for notice in loaded.notices:
        logger.warning(notice)
    if mistakes := [*mistakes, *wrong]:
        raise ConfigError(mistakes)
    return loaded


def build(
    tree: type[T], layers: Sequence[Layer], *, old_names: OldNames, check_rules: bool = True
) -> tuple[Loaded[T], list[str]]:
    """Merge layers, where later ones win, and check everything.

    Args:
        tree: The settings.
        layers: Settings of each source.
        old_names: Names of torchtitan 0.2.
        check_rules: Whether to check rules between keys. False if a file could not be read, and for
            settings that were checked when they were stored.

    Returns:
        The settings, with defaults where values are wrong, and the mistakes.
    """
    mistakes, notices, merged = list[str](), list[str](), Layer()
    for layer in layers:
        if (file := layer.get(CONFIG_FILE)) is not None and file.is_in_file:
            rule = 'is for the command line only; write base = "other.toml" at the top of a file'
            mistakes.append(f"{file.where()}: {rule}")
        _merge(_rename(layer, old_names, mistakes, notices), into=merged, tree=tree)
    settings = [pair for layer in layers for pair in layer.items()]
    old = [item.origin for path, item in settings if item.is_in_file and path in old_names]
    accepted = _drop_refused(merged, old_names, mistakes, notices, tree=tree)
    values: dict[Path, object] = {}
    wrong = set[Path]()
    for path, setting in accepted.items():
        if path not in keys(tree):
            if path not in sections(tree) or setting.value != {}:
                mistakes.append(_describe_unknown(path, setting, tree=tree, old_names=old_names))
        elif setting.value is not None:  # `none` on the command line restores the default
            try:
                values[path] = keys(tree)[path].convert(setting.value)
            except ValueError as error:
                wrong.add(path)
                mistakes.append(f"{setting.where()}: {error}")
    config = _make(tree, values)
    if check_rules:
        wrong |= merged.keys() - accepted.keys()
        for violation in violations(config):
            # a rule about a key that was refused would speak of its default
            if wrong.isdisjoint(tuple(key.split(".")) for key in violation.keys):
                target = notices if violation.is_notice else mistakes
                target.append(_add_origin(violation, accepted))
    loaded = Loaded(config, merged, notices, next(iter(old), None))
    return loaded, list(dict.fromkeys(mistakes))


def checked(config: T) -> T:
    """Return settings that Python code has built or changed with values of the keys' types.

    A dataclass checks and converts nothing: one path would stay a string where a tuple is due.

    Raises:
        ConfigError: Lists each wrong value or broken rule.
    """
    for path, cls in sections(type(config)).items():  # outer sections come before inner ones
        if not isinstance(section := value_at(config, path), cls):
            raise ConfigError.at(".".join(path), f"must be a {cls.__name__}, got {section!r:.60}")
    values = values_of(config)
    layer = {path: Setting(value, PYTHON, path) for path, value in values.items()}
    loaded, mistakes = build(type(config), [layer], old_names=OldNames())
    if mistakes:
        raise ConfigError(mistakes)
    return loaded.config


def violations(config: object) -> Iterator[Violation]:
    """Yield each broken rule between keys."""
    values = values_of(config)
    for path, key in keys(type(config)).items():
        for item in key.metadata:
            if isinstance(item, Requires):
                value, default = values[path], key.default
                if value not in item.of if item.of else same(value, default):
                    continue
                other = tuple(item.key.split(".")) if "." in item.key else (*path[:-1], item.key)
                if not item.is_met_by(values[other]):
                    effect = "has no effect: it " if item.is_notice else ""
                    rule = f"{effect}needs {item.text}, got {literal(values[other])}; {item.remedy}"
                    names = (".".join(path), ".".join(other))
                    yield Violation(names, rule, is_notice=item.is_notice)
                    if item.is_notice:  # what has no effect requires nothing else
                        break
        for other in key.replaced(path):
            both = values[path], values[other]
            if all(map(has_value, both)) and any(both):  # 0 and 0 agree
                rule = f"replaces {other[-1]}, which is {literal(values[other])}; remove one"
                yield Violation((".".join(path), ".".join(other)), rule)
    for path in ((), *sections(type(config))):
        section = value_at(config, path)
        if isinstance(section, HasRules):
            for violation in section.violations():
                yield violation.within(".".join(path)) if path else violation


def _make(tree: Any, values: Mapping[Path, object], prefix: Path = ()) -> Any:
    """Build a section from the values of its keys."""
    arguments: dict[str, object] = {}
    for name in (item.name for item in dataclasses.fields(tree)):
        path = (*prefix, name)
        if (name,) in sections(tree):
            arguments[name] = _make(sections(tree)[name,], values, path)
        elif path in values:
            arguments[name] = values[path]
    return tree(**arguments)


def _rename(layer: Layer, old_names: OldNames, mistakes: list[str], notices: list[str]) -> Layer:
    """Return a layer by today's names.

    Layers are translated before they are merged, so that a later one with today's name overrides
    an earlier one with the old name.
    """
    result: Layer = {}
    for path, setting in layer.items():
        new = old_names.renamed.get(".".join(path))
        if new is None:
            result[path] = setting
            continue
        if any((".".join(path), value) in old_names.values for value in _as_list(setting.value)):
            continue
        target = tuple(new.split("."))
        current, name = layer.get(target), spell(target, origin=setting.origin)
        if current is not None and not same(current.value, setting.value):
            rule = f"is the old name of {name}, which is {literal(current.value)}; remove one"
            mistakes.append(f"{setting.where()}: {rule}")
        else:
            notices.append(f"{setting.where()}: is torchtitan's name; here it is {name}")
            result.setdefault(target, setting)
    return result


def _merge(layer: Layer, *, into: Layer, tree: type) -> None:
    """Add a layer to those below it. In a file, a table of any keys is replaced as a whole; options
    of the command line set one item of it."""
    for path, key in keys(tree).items():
        for partner in key.replaced(path):
            for this, that in ((path, partner), (partner, path)):
                if this in layer and has_value(layer[this].value):
                    into.pop(that, None)
    for path, setting in layer.items():
        table = path[:-1]
        if table in keys(tree) and keys(tree)[table].kind is dict:
            below = into[table].value if table in into else {}
            items = {**(below if isinstance(below, dict) else {}), path[-1]: setting.value}
            items = {name: value for name, value in items.items() if value is not None}
            into[table] = Setting(items, setting.origin, table)
        else:
            into[path] = setting


def _drop_refused(
    layer: Layer, old_names: OldNames, mistakes: list[str], notices: list[str], *, tree: type
) -> Layer:
    """Return the settings without names of torchtitan that are not built here. Those that request
    something are mistakes, or notices while their feature is off."""
    kept: Layer = {}
    for path, setting in layer.items():
        refused = old_names.find(path, setting.value)
        if refused is None:
            kept[path] = setting
            continue
        if path not in keys(tree):
            forms, accepted = (setting.value, [setting.value]), (None, *(refused.accepts or OFF))
            if any(same(form, item) for form in forms for item in accepted):
                continue
        if refused.when and not _is_on(refused.when, layer, tree=tree):
            switch = refused.when[0]
            notices.append(f"{setting.where()}: has no effect without {switch} ({refused.reason})")
        else:
            mistakes.append(f"{setting.where()}: {refused.reason}")
    return kept


def _is_on(when: tuple[str, ...], layer: Layer, *, tree: type) -> bool:
    path = tuple(when[0].split("."))
    default = keys(tree)[path].default if path in keys(tree) else None
    value = layer[path].value if path in layer else default
    if when[1:]:
        return any(item in when[1:] for item in _as_list(value))
    return not any(same(value, off) for off in OFF)


def _describe_unknown(path: Path, setting: Setting, *, tree: type, old_names: OldNames) -> str:
    """Return what is wrong with a key that the tree lacks, and what may have been meant."""
    origin, tree_keys, tables = setting.origin, keys(tree), sections(tree)
    if path in tables:
        form = spell((*path, "key"), origin=origin)
        return f"{setting.where()}: is a section, not a key; write {form} ..."
    parents = [path[:end] for end in range(1, len(path)) if path[:end] in tree_keys]
    if parents:
        return f"{setting.where()}: {spell(parents[0], origin=origin)} is a value, not a table"
    section = path if setting.value == {} else path[:-1]
    if section and section not in tables and origin != COMMAND_LINE:
        guess = _closest(section, tables)
        match = f"; did you mean {header(guess)}?" if guess else ""
        return f"{origin}: unknown section {header(section)}{match}"
    # a key of another section by this very name is the most frequent slip
    same_name = [name for name in tree_keys if name[-1] == path[-1]]
    refused = (tuple(name.split(".")) for name in old_names.refused)
    guess = next(iter(same_name), None) or _closest(path, [*tree_keys, *refused])
    rule = f"{header(path[:-1])} has no key {path[-1]!r}" if len(path) > 1 else "has no section"
    if guess:
        return f"{setting.where()}: {rule}; did you mean {spell(guess, origin=origin)}?"
    valid = [name[-1] for name in tree_keys if name[:-1] == path[:-1]] or list(map(header, tables))
    return f"{setting.where()}: {rule}; valid are {', '.join(valid)}"


def _closest(path: Path, paths: Iterable[Path]) -> Path | None:
    names = {".".join(name): name for name in paths}
    close = difflib.get_close_matches(".".join(path), names, n=1, cutoff=0.65)
    return names[close[0]] if close else None


def _add_origin(mistake: str | Violation, given: Layer) -> str:
    """Begin a mistake with the first key of its rule that is given."""
    if isinstance(mistake, str):
        return mistake
    paths = [tuple(key.split(".")) for key in mistake.keys]
    prefixes = [path[:end] for path in paths for end in range(len(path), 0, -1)]
    written = [given[p] for p in prefixes if p in given and given[p].value is not None]
    where = written[0].where() if written else f"default: {spell(paths[0])}"
    return f"{where}: {mistake.rule}"
