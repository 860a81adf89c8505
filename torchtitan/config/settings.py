"""Settings: a tree of frozen dataclasses, read from TOML files and `--section.key VALUE` options.

Every source is a layer, a flat dictionary from a key's path to its value and origin. A later source
wins by `dict.update`, and an error names the origin. All mistakes are reported together.

An annotation is a scalar, a Literal, `T | None`, `dict[str, T]`, `tuple[T, ...]`, which also takes
a single value, or `tuple[SomeDataclass, ...]`, a list of tables. `Annotated` adds `Rule`s and other
functions that raise ValueError, `Parse` and `Requires`. Conversion is strict: 2.5 is no integer.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import json
import logging
import math
import operator
import os
import re
import sys
import types
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import MISSING, dataclass, is_dataclass
from pathlib import Path as FilePath
from typing import Annotated, Any, Generic, Literal, Protocol, TypeVar

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
CONFIG_FILE: Path = ("job", "config_file")
"""Names the file to read. It is valid on the command line only."""
_PACKAGE = FilePath(__file__).parents[1]
RECIPES = (_PACKAGE / "train_configs", _PACKAGE.parent / "train_configs")
"""Folders of the files that a name without folder and suffix means: of a wheel, of a checkout."""
COMMAND_LINE, PYTHON = "command line", "load_config(...)"
MAX_SHOWN = 100
"""Characters of a value that a message repeats."""

# --- annotations -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Rule:
    """A rule about one value, such as `> 0`.

    `text` follows "must be" or the name of a key, `holds` returns whether a value keeps the rule,
    `names` are names that keep it.
    """

    text: str
    holds: Callable[[Any], object]
    names: tuple[str, ...] = ()

    def __call__(self, value: Any) -> None:
        """Raise ValueError for a value that breaks the rule."""
        if not self.holds(value):
            raise ValueError(f"must be {self.text}{did_you_mean(str(value), self.names)}")


def Range(  # noqa: N802
    *,
    gt: float = -math.inf,
    ge: float = -math.inf,
    lt: float = math.inf,
    le: float = math.inf,
) -> Rule:
    """Return the rule of a number's bounds."""
    bounds = {">": (operator.gt, gt), ">=": (operator.ge, ge)}
    bounds |= {"<": (operator.lt, lt), "<=": (operator.le, le)}
    bounds = {sign: pair for sign, pair in bounds.items() if math.isfinite(pair[1])}
    text = " and ".join(f"{sign} {bound:g}" for sign, (_, bound) in bounds.items())
    return Rule(text, lambda value: all(keeps(value, bound) for keeps, bound in bounds.values()))


def one_of(names: tuple[str, ...]) -> Rule:
    """Return the rule of a Literal."""
    return Rule(f"one of {', '.join(names)}", lambda value: value in names, names)


def ImportPath(*names: str) -> Rule:  # noqa: N802
    """Return the rule of a string that is one of `names`, or the import path of custom code."""
    text = f"{', '.join(names)} or an import path, package.module:NAME"
    return Rule(text, lambda value: value in names or is_import_path(value), names)


def NameOrNumber(*names: str) -> Rule:  # noqa: N802
    """Return the rule of one of the names, or a positive integer in digits."""
    is_number = re.compile("0*[1-9][0-9]{0,8}").fullmatch
    text = f'{", ".join(names)} or a positive integer in quotes, such as "2"'
    return Rule(text, lambda value: value in names or is_number(value), names)


def has_value(value: object) -> bool:
    """Return whether a value is neither None nor empty."""
    return value not in (None, (), [], {}, "")


SET = Rule("", has_value)
UNSET = Rule("= none", lambda value: not has_value(value))
"""Of another setting that replaces this one. In files, the later choice wins."""
IMPORT_PATH = Rule("= package.module:NAME", is_import_path)
ENABLED = Range(ge=1)


@dataclass(frozen=True)
class Requires:
    """Another setting that a key requires once it differs from its default.

    momentum: Annotated[float, Requires("name", "SGD")] = 0.0

    Args:
        key: Key of the same section, or a dotted path from the top.
        wanted: Required value, a tuple of alternatives, or a rule.
        of: Values of the key that require it. Default: all but its default.
        is_notice: Without it the key has no effect, and the job starts with a notice.
    """

    key: str
    wanted: object
    remedy: str = "set that, or remove this"
    of: tuple[object, ...] = ()
    is_notice: bool = False

    @property
    def rule(self) -> Rule:
        """The rule of the other setting."""
        if isinstance(self.wanted, Rule):
            return self.wanted
        values = self.wanted if isinstance(self.wanted, tuple) else (self.wanted,)
        return Rule(f"= {' or '.join(map(literal, values))}", lambda value: value in values)

    def __str__(self) -> str:
        return f"{self.key} {self.rule.text}".strip()

    def path(self, of: Path) -> Path:
        """Return the path of the other setting, for the key at a path."""
        return tuple(self.key.split(".")) if "." in self.key else (*of[:-1], self.key)


@dataclass(frozen=True)
class Parse:
    """A function that is applied to a value before its type is checked."""

    function: Callable[[object], object]


def _check_text(value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def path_or_url(value: str) -> None:
    """Check for a path, or a URL of a supported store."""
    if is_url(value) and (problem := url_problem(value)):
        raise ValueError(problem)


def _is_inside(path: str) -> bool:
    is_relative = not is_url(path) and not os.path.isabs(path)
    return is_relative and os.path.normpath(path).split(os.sep)[0] != ".."


inside_dump_folder = Rule("a relative path inside job.dump_folder", _is_inside)
finite = Rule("finite", math.isfinite)
is_custom_object = Rule(
    '{path = "package.module:NAME", ...}', lambda table: is_import_path(table.get("path"))
)

Options = dict[str, Any]
"""Keyword arguments of a custom object."""
CustomObject = Annotated[
    Options,
    Parse(lambda value: {"path": value} if isinstance(value, str) else value),
    is_custom_object,
]
"""A table with the import path of a class and its keyword arguments, or only the path."""
Text = Annotated[str, _check_text]
LocalPath = Annotated[Text, Rule("a path, not a URL", lambda value: not is_url(value))]
PathOrURL = Annotated[Text, path_or_url]
PositiveInt = Annotated[int, Range(gt=0)]
NonNegativeInt = Annotated[int, Range(ge=0)]
MinusOneOrMore = Annotated[int, Rule("-1 or at least 1", lambda value: value == -1 or value > 0)]
FinitePositive = Annotated[float, finite, Range(gt=0)]
FiniteNonNegative = Annotated[float, finite, Range(ge=0)]
Fraction = Annotated[float, Range(ge=0, le=1)]

# --- values ------------------------------------------------------------------------------------

SCALARS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
UNIONS = (typing.Union, types.UnionType)


def convert(value: object, annotation: Any) -> Any:
    """Return a TOML value as the type of an annotation; raise ValueError that states the rule that
    the value breaks."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        for item in arguments[1:]:
            value = item.function(value) if isinstance(item, Parse) else value
        value = convert(value, arguments[0])
        for check in arguments[1:] if value is not None else ():
            if callable(check):
                check(value)
        return value
    if origin in UNIONS:
        return None if value is None else convert(value, arguments[0])
    if origin is Literal:
        one_of(arguments)(value)
        return value
    if origin is tuple:
        items = value if isinstance(value, list | tuple) else [value]
        return tuple(_convert_item(item, arguments[0], i) for i, item in enumerate(items, start=1))
    if origin is dict or is_dataclass(annotation):
        return _convert_table(value, annotation)
    if annotation is float and type(value) is int:
        return float(value) if abs(value) < 1e300 else math.inf
    is_text = annotation is str and isinstance(value, str)  # a StoredPath is one
    if annotation is not Any and type(value) is not annotation and not is_text:
        raise ValueError(f"must be {SCALARS[annotation]}")
    if type(value) is int and abs(value) >= 2**63:
        raise ValueError("must fit into 64 bits")
    if isinstance(value, str) and re.search("[\0\ud800-\udfff]", value):
        raise ValueError("must be UTF-8 without the character NUL (\\u0000)")
    return value


def _convert_item(value: object, annotation: Any, name: object) -> Any:
    try:
        return convert(value, annotation)
    except ValueError as error:
        raise ValueError(f"item {name}: {error}") from error


def _convert_table(value: object, annotation: Any) -> Any:
    is_section = is_dataclass(annotation)
    if is_section and isinstance(value, typing.cast(type, annotation)):
        return value  # from Python
    if not isinstance(value, dict):
        raise ValueError("must be a table, {key = value}")
    if not is_section:
        hint = typing.get_args(annotation)[1]
        return {convert(name, str): _convert_item(x, hint, name) for name, x in value.items()}
    items = {name: key for (name,), key in keys(annotation).items()}
    for name in value:
        if name not in items:
            raise ValueError(f"has no key {name!r}{did_you_mean(name, items)}")
    for name, key in items.items():
        if name not in value and key.default is MISSING:
            raise ValueError(f"needs the key {name}")
    arguments = {name: _convert_item(x, items[name].annotation, name) for name, x in value.items()}
    return annotation(**arguments)


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


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of a tree."""

    section: type
    """The class with the field."""
    field: dataclasses.Field[Any]
    annotation: Any
    default: Any
    """The default, or `dataclasses.MISSING`."""
    item: Any
    """Innermost type: str, int, float, bool, Any, or the dataclass of a list of tables."""
    list_depth: int
    """1 for a list, 2 for a list of lists."""
    is_table: bool
    """Whether it is a table of any keys."""
    is_nullable: bool
    """Whether `none` on the command line restores its default."""
    metadata: tuple[Any, ...]
    """Rules, checks and requirements."""

    @property
    def requirements(self) -> list[Requires]:
        """Other settings that it requires."""
        return [item for item in self.metadata if isinstance(item, Requires)]


def _describe(section: type, item: dataclasses.Field[Any], annotation: Any) -> Key:
    origins, metadata, inner = list[Any](), list[Any](), annotation
    while (origin := typing.get_origin(inner)) is not None:
        arguments = typing.get_args(inner)
        origins.append(origin)
        metadata += arguments[1:] if origin is Annotated else ()
        metadata += [one_of(arguments)] if origin is Literal else ()
        inner = str if origin is Literal else arguments[origin is dict]
    containers = [origin for origin in origins if origin in (tuple, dict)]
    return Key(
        section=section,
        field=item,
        annotation=annotation,
        default=item.default if item.default_factory is MISSING else item.default_factory(),
        item=inner,
        list_depth=containers.count(tuple),
        is_table=containers[:1] == [dict],
        is_nullable=bool(containers) or any(origin in UNIONS for origin in origins),
        metadata=tuple(metadata),
    )


def _find_keys(tree: Any) -> Mapping[Path, Key]:
    """Return every key of a tree by its path."""
    paths = dict[Path, Key]()
    for item in dataclasses.fields(tree):
        hint = _hints(tree)[item.name]
        inner = keys(hint) if is_dataclass(hint) else {(): _describe(tree, item, hint)}
        paths |= {(item.name, *path): key for path, key in inner.items()}
    return paths


def _find_sections(tree: Any) -> Mapping[Path, type]:
    """Return every section of a tree by its path, outer ones first."""
    paths = dict[Path, type]()
    for name, hint in _hints(tree).items():
        if is_dataclass(hint):
            paths[name,] = typing.cast(type, hint)
            paths |= {(name, *path): section for path, section in sections(hint).items()}
    return paths


_hints: Callable[[Any], Mapping[str, Any]] = functools.cache(
    functools.partial(typing.get_type_hints, include_extras=True)
)
keys: Callable[[Any], Mapping[Path, Key]] = functools.cache(_find_keys)
sections: Callable[[Any], Mapping[Path, type]] = functools.cache(_find_sections)


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
        is_option = self.origin == COMMAND_LINE
        text = self.value if is_option and isinstance(self.value, str) else literal(self.value)
        text = hide_credentials(printable(text).replace("\n", "\\n"))
        text = text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]} ..."
        equals = " " if is_option else " = "
        return f"{self.origin}: {spell(self.path, origin=self.origin)}{equals}{text}"


Layer = dict[Path, Setting]


def spell(path: Path, *, origin: str = "") -> str:
    """Write a key: `--training.steps` on the command line, `[training] steps` elsewhere."""
    if origin == COMMAND_LINE:
        return "--" + ".".join(path)
    return f"[{'.'.join(path[:-1])}] {path[-1]}" if len(path) > 1 else path[0]


def flatten(
    table: Mapping[str, object], *, origin: str, tree: Any = None, prefix: Path = ()
) -> Layer:
    """Return nested tables as a layer. A table of any keys of the tree stays one value."""
    layer: Layer = {}
    for name, value in table.items():
        path = (*prefix, name)
        key = None if tree is None else keys(tree).get(path)
        if isinstance(value, dict) and value and not (key and key.is_table):
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


def recipes() -> dict[str, FilePath]:
    """Return the jobs that come with the library, by name."""
    return {path.stem: path for folder in RECIPES for path in sorted(folder.glob("*.toml"))}


def read_files(file: Setting, *, tree: Any = None, seen: tuple[FilePath, ...] = ()) -> list[Layer]:
    """Read a file after its bases: `base = "other.toml"` at its top, relative to its own folder;
    raise ConfigError if a file is missing, is not TOML, or inherits from itself."""
    if not (isinstance(file.value, str) and file.value):
        raise ConfigError(f"{file.where()}: must name one file")
    path = FilePath(file.value).expanduser()
    if file.is_in_file:
        path = FilePath(os.path.normpath(FilePath(file.origin).parent / path))
    elif not path.is_file():  # a folder of weights may have a recipe's name
        path = recipes().get(file.value, path)
    if path.resolve() in seen:
        raise ConfigError(f"{file.where()}: files must not inherit in a circle")
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except (OSError, ValueError) as error:
        guess = "" if file.is_in_file else did_you_mean(file.value, recipes())
        raise ConfigError(
            f"{file.where()}: cannot be read from {FilePath.cwd()}: {error}{guess}"
        ) from error
    table = parse(text, origin=str(path))
    bases = [Setting(table.pop("base"), str(path), ("base",))] if "base" in table else []
    layers = [read_files(base, tree=tree, seen=(*seen, path.resolve())) for base in bases]
    return [*itertools.chain(*layers), flatten(table, origin=str(path), tree=tree)]


def parse_command_line(argv: Sequence[str], *, tree: type) -> tuple[Layer, list[str]]:
    """Return the settings of `[JOB] --section.key VALUE ...`, and a mistake for each stray word.
    JOB is the file to read.

    Names and types are checked later, together with the files.
    """
    layer: Layer = {}
    mistakes, words = list[str](), list(argv)
    if words and not words[0].startswith("--"):
        layer[CONFIG_FILE] = Setting(words.pop(0), COMMAND_LINE, CONFIG_FILE)
    while words:
        word = words.pop(0)
        if not word.startswith("--"):
            mistakes.append(f"{COMMAND_LINE}: {word!r} belongs to no option")
            continue
        name, equals, value = word[2:].partition("=")
        path = tuple(name.split("."))
        if path == CONFIG_FILE and path in layer:
            mistakes.append(f"{COMMAND_LINE}: --{name} names a second file to read")
        key = keys(tree).get(path)
        values = [value] if equals else []
        is_list = key is None or key.list_depth > 0
        while words and not words[0].startswith("--") and not equals and (is_list or not values):
            values.append(words.pop(0))
        layer[path] = Setting(_read_words(values, key=key), COMMAND_LINE, path)
    return layer, mistakes


def _read_words(words: Sequence[str], *, key: Key | None) -> object:
    """Return the value of an option's words, which is true without any."""
    if key is None or (key.list_depth == 1 and key.item is str):
        # also a,b, as in torchtitan's docs; quotes, brackets and slashes keep a comma
        parts = [[w] if set(w) & set("[]{}\"'/") else w.split(",") for w in words]
        words = [word.strip() for word in itertools.chain(*parts)]
    values = [_read_word(word, key=key) for word in words] or [True]
    return values if len(values) > 1 else values[0]


def _read_word(word: str, *, key: Key | None) -> object:
    """Return the TOML value of a word, or the word itself where a string is due."""
    if word.lower() == "none" and (key is None or key.is_nullable):
        return None
    if word in ("True", "False") and key is not None and key.item is bool:
        return word == "True"
    try:
        table = tomllib.loads(f"value = {word}")
    except (ValueError, RecursionError):
        return word
    value = table["value"] if len(table) == 1 else word
    if key is None or key.item is not str:
        return value
    # flavor = 20 is the string "20"; quotes and lists are read as TOML
    return value if isinstance(value, (str, list) if key.list_depth else str) else word


def to_toml(config: object, *, only_changed: bool = False) -> str:
    """Write resolved settings. Loading them gives an equal tree, but for the file's name.

    `only_changed` leaves out settings that have their default.
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


# --- load --------------------------------------------------------------------------------------


class OldNames(Protocol):
    """Names of another version; see `old_names.py`."""

    @property
    def refused(self) -> Mapping[str, str]:
        """Keys that are not built."""

    def rename(self, layer: Layer, mistakes: list[str], notices: list[str]) -> Layer:
        """Return a layer by today's names."""

    def refuse(
        self, layer: Layer, mistakes: list[str], notices: list[str], *, tree: type
    ) -> tuple[Layer, set[Path]]:
        """Return the settings that are built here, and the keys that are refused."""

    def differences(self, layers: Sequence[Layer], values: Mapping[Path, Any]) -> Iterator[str]:
        """Yield other defaults of a file with old names."""


@typing.runtime_checkable
class HasRules(Protocol):
    """A section or a tree with rules between its keys."""

    def violations(self) -> Iterator[Violation]:
        """Yield each broken rule, with keys relative to the section."""


@dataclass(frozen=True)
class Loaded(Generic[T]):
    """Loaded settings.

    Args:
        config: The tree.
        layer: What files and command line hold, by today's names.
        notices: Remarks on settings without effect and on old names.
    """

    config: T
    layer: Layer
    notices: list[str]

    @contextmanager
    def wording(self) -> Iterator[None]:
        """Add the origin of settings to a ConfigError that is raised inside."""
        try:
            yield
        except ConfigError as error:
            raise ConfigError([_add_origin(m, self.layer) for m in error.mistakes]) from error


def load(tree: type[T], argv: Sequence[str] | Layer, *, old_names: OldNames) -> Loaded[T]:
    """Read the file that the command line (or a layer from Python) names, apply the other options,
    and check everything; raise ConfigError that lists every mistake."""
    options, mistakes = argv, list[str]()
    if not isinstance(options, dict):
        options, mistakes = parse_command_line(options, tree=tree)
    layers = list[Layer]()
    if (file := options.get(CONFIG_FILE)) is not None and file.value is not None:
        layers = read_files(file, tree=tree)
    loaded, wrong = build(tree, [*layers, options], old_names=old_names)
    for notice in loaded.notices:
        logger.warning(notice)
    if mistakes := [*mistakes, *wrong]:
        raise ConfigError(mistakes)
    return loaded


def build(
    tree: type[T],
    layers: Sequence[Layer],
    *,
    old_names: OldNames | None = None,
    check_rules: bool = True,
) -> tuple[Loaded[T], list[str]]:
    """Merge layers, where later ones win, and check everything. Rules between keys were checked
    before (`check_rules`) where settings were stored.

    Returns:
        The settings, with defaults where values are wrong, and the mistakes.
    """
    mistakes, notices, merged = list[str](), list[str](), Layer()
    for layer in layers:
        if CONFIG_FILE in layer and layer[CONFIG_FILE].is_in_file:
            mistakes.append(f'{layer[CONFIG_FILE].where()}: write base = "other.toml" at the top')
        translated = layer if old_names is None else old_names.rename(layer, mistakes, notices)
        _merge(translated, into=merged, tree=tree)
    kept, wrong, values = merged, set[Path](), dict[Path, object]()
    if old_names is not None:
        kept, wrong = old_names.refuse(merged, mistakes, notices, tree=tree)
    for path, setting in kept.items():
        if path not in keys(tree):
            if path not in sections(tree) or setting.value != {}:
                mistakes.append(_describe_unknown(setting, tree=tree, old_names=old_names))
        elif setting.value is not None:  # `none` on the command line restores the default
            try:
                values[path] = convert(setting.value, keys(tree)[path].annotation)
            except ValueError as error:
                wrong.add(path)
                mistakes.append(f"{setting.where()}: {error}")
    config = _build_section(tree, values)
    for violation in violations(config) if check_rules else ():
        # a rule about a key that was refused would speak of its default
        if wrong.isdisjoint(tuple(key.split(".")) for key in violation.keys):
            target = notices if violation.is_notice else mistakes
            target.append(_add_origin(violation, kept))
    if old_names is not None:
        notices += old_names.differences(layers, values_of(config))
    return Loaded(config, merged, notices), list(dict.fromkeys(mistakes))


def checked(config: T) -> T:
    """Return settings that Python code has built or changed with values of the keys' types.

    A dataclass checks and converts nothing: one path would stay a string where a tuple is due.
    Raises ConfigError that lists each wrong value or broken rule.
    """
    layer = {path: Setting(value, PYTHON, path) for path, value in values_of(config).items()}
    loaded, mistakes = build(type(config), [layer])
    if mistakes:
        raise ConfigError(mistakes)
    return loaded.config


def violations(config: object) -> Iterator[Violation]:
    """Yield each broken rule between keys."""
    values = values_of(config)
    for path, key in keys(type(config)).items():
        for need in key.requirements:
            if values[path] not in need.of if need.of else values[path] == key.default:
                continue
            required = need.path(path)
            if not need.rule.holds(values[required]):
                effect = "has no effect: it " if need.is_notice else ""
                rule = f"{effect}needs {need}, got {literal(values[required])}; {need.remedy}"
                yield Violation(
                    (".".join(path), ".".join(required)), rule, is_notice=need.is_notice
                )
                if need.is_notice:  # what has no effect requires nothing else
                    break
    for path in ((), *sections(type(config))):
        section = value_at(config, path)
        if isinstance(section, HasRules):
            for violation in section.violations():
                yield violation.within(".".join(path)) if path else violation


def _build_section(cls: Any, values: Mapping[Path, object], prefix: Path = ()) -> Any:
    """Build a section from the values of its keys."""
    arguments: dict[str, object] = {}
    for name in (item.name for item in dataclasses.fields(cls)):
        path = (*prefix, name)
        if (name,) in sections(cls):
            arguments[name] = _build_section(sections(cls)[name,], values, path)
        elif path in values:
            arguments[name] = values[path]
    return cls(**arguments)


def _merge(layer: Layer, *, into: Layer, tree: type) -> None:
    """Add a layer to those below it. In a file, a table of any keys is replaced completely; options
    of the command line set one item of it."""
    for path, key in keys(tree).items():
        for partner in [need.path(path) for need in key.requirements if need.wanted is UNSET]:
            for this, replaced in ((path, partner), (partner, path)):
                if this in layer and has_value(layer[this].value):
                    into.pop(replaced, None)
    for path, setting in layer.items():
        table = path[:-1]
        if table in keys(tree) and keys(tree)[table].is_table:
            below = into[table].value if table in into else {}
            items = {**below} if isinstance(below, dict) else {}
            items[path[-1]] = setting.value
            items = {name: value for name, value in items.items() if value is not None}
            into[table] = Setting(items, setting.origin, table)
        else:
            into[path] = setting


def _describe_unknown(setting: Setting, *, tree: type, old_names: OldNames | None) -> str:
    """Return what is wrong with a key that the tree lacks, and what may have been meant."""
    names = {".".join(path): path for path in keys(tree)}
    names |= {} if old_names is None else {key: tuple(key.split(".")) for key in old_names.refused}
    # a key of another section by this very name is the most frequent slip
    matches = [path for path in keys(tree) if path[-1] == setting.path[-1]]
    close = difflib.get_close_matches(".".join(setting.path), names, n=1, cutoff=0.65)
    matches += [names[name] for name in close]
    guess = f"; did you mean {spell(matches[0], origin=setting.origin)}?" if matches else ""
    return f"{setting.where()}: no such setting{guess}"


def _add_origin(mistake: str | Violation, layer: Layer) -> str:
    """Begin a mistake with the first key of its rule that a source holds."""
    if isinstance(mistake, str):
        return mistake
    paths = [tuple(key.split(".")) for key in mistake.keys]
    prefixes = [path[:end] for path in paths for end in range(len(path), 0, -1)]
    written = [layer[p] for p in prefixes if p in layer and layer[p].value is not None]
    where = written[0].where() if written else f"default: {spell(paths[0])}"
    return f"{where}: {mistake.rule}"
