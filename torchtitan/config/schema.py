"""The schema of settings: frozen dataclasses, read as keys with types, bounds and requirements.

A tree is a dataclass whose fields are values or sections, which are dataclasses again. `keys` lists
every key by its path, for the command line, `--help` and error messages. `convert` turns a TOML
value into the type of an annotation, strictly: 2.5 is not an integer and "3" is not a number.

An annotation is str, int, float, bool, a Literal of strings, `T | None`, `dict[str, T]`,
`tuple[T, ...]`, which also takes a single value, or `tuple[SomeDataclass, ...]`, a list of tables.
`Annotated` adds bounds of annotated-types, functions that raise ValueError, `Parse` and `Requires`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import operator
import os
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, is_dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

from annotated_types import BaseMetadata, Ge, Gt, Le, Lt

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import did_you_mean
from torchtitan.base.urls import is_url, url_problem

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T")
Path = tuple[str, ...]
MAX_INT = 10**12
"""Largest integer of a key without an upper bound, so that derived sizes fit into 64 bits."""
UNIONS = (typing.Union, types.UnionType)
SCALARS = {str: "a string", int: "an integer", float: "a number", bool: "true or false"}
BOUNDS: tuple[tuple[type, str, Callable[[Any, Any], bool], str, str], ...] = (
    (Gt, "gt", operator.gt, ">", "greater than"),
    (Ge, "ge", operator.ge, ">=", "greater than or equal to"),
    (Lt, "lt", operator.lt, "<", "less than"),
    (Le, "le", operator.le, "<=", "less than or equal to"),
)

# --- what an annotation may hold ---------------------------------------------------------------


GIVEN = object()
"""A required value: any but None and an empty list, table or string."""
IMPORT_PATH = object()
"""A required value: the import path of custom code."""


@dataclass(frozen=True)
class Requires:
    """Another setting that a key requires once it differs from its default.

    momentum: Annotated[float, Requires("name", "SGD")] = 0.0

    Args:
        key: Key of the same section, or a dotted path from the top.
        wanted: Required value, minimum (`Ge`), `GIVEN` or `IMPORT_PATH`. A tuple lists
            alternatives.
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
        if self.wanted is GIVEN:
            return self.key
        if self.wanted is IMPORT_PATH:
            return f"{self.key} = package.module:NAME"
        if isinstance(self.wanted, Ge):
            return f"{self.key} >= {self.wanted.ge}"
        return f"{self.key} = {' or '.join(map(literal, self._alternatives))}"

    def applies_to(self, value: object, *, default: object) -> bool:
        """Return whether this value of the key requires anything."""
        return value in self.of if self.of else not same(value, default)

    def is_met_by(self, other: object) -> bool:
        """Return whether the other setting has a required value."""
        if self.wanted is GIVEN:
            return is_given(other)
        if self.wanted is IMPORT_PATH:
            return is_import_path(other)
        if isinstance(self.wanted, Ge):
            minimum: Any = self.wanted.ge
            return isinstance(other, int) and other >= minimum
        return any(same(other, value) for value in self._alternatives)

    def rule(self, other: object) -> str:
        """Describe that the value of the other setting does not meet it."""
        effect = "has no effect: it " if self.is_notice else ""
        got = "" if self.wanted is GIVEN else f", got {literal(other)}"
        return f"{effect}needs {self.text}{got}; {self.remedy}"

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
        others: Whether any other string is left to a later check.
    """

    def __init__(self, *names: str, others: bool = False) -> None:
        self.names, self._others = names, others

    def __call__(self, value: str) -> None:
        """Raise ValueError if it is neither."""
        if value in self.names or self._others or is_import_path(value):
            return
        names = f"one of {', '.join(self.names)}, or " if self.names else ""
        raise ValueError(
            f"must be {names}an import path, my_package.my_module:NAME"
            f"{did_you_mean(value, self.names)}"
        )


def _object_table(value: object) -> object:
    """Return the table of a custom object that is written as its import path alone."""
    return {"path": value} if isinstance(value, str) else value


def _has_import_path(value: Mapping[str, object]) -> None:
    if not is_import_path(value.get("path")):
        rule = 'must be {path = "my_package.my_module:NAME", ...} with keyword arguments'
        raise ValueError(rule)


def named_or_number(*names: str) -> Callable[[str], None]:
    """Return a check for one of the names, or a positive integer in digits."""

    def check(value: str) -> None:
        is_number = value.isascii() and value.isdecimal() and 0 < len(value.lstrip("0")) < 10
        if value not in names and not is_number:
            guess = did_you_mean(value, names)
            rule = f'must be {", ".join(names)} or a positive integer in quotes, such as "2"{guess}'
            raise ValueError(rule)

    return check


def is_given(value: object) -> bool:
    """Return whether a value is neither None nor empty."""
    return value not in (None, (), [], {}, "")


def _not_empty(value: str) -> None:
    if not value:
        raise ValueError("must not be empty")


def finite(value: float) -> None:
    """Check for a finite number."""
    if not math.isfinite(value):
        raise ValueError("must be a finite number")


def _local_path(value: str) -> None:
    if is_url(value):
        raise ValueError("must be a path, not a URL")


def path_or_url(value: str) -> None:
    """Check for a path, or a URL of a supported store."""
    if is_url(value) and (problem := url_problem(value)):
        raise ValueError(problem)


def inside_dump_folder(value: str) -> None:
    """Check for a path that lies inside job.dump_folder."""
    _local_path(value)
    if os.path.isabs(value) or os.path.normpath(value).split(os.sep)[0] == "..":
        raise ValueError("must lie inside job.dump_folder; write a relative path")


def _minus_one_or_more(value: int) -> None:
    if value != -1 and value < 1:
        raise ValueError("must be -1 or at least 1")


Text = Annotated[str, _not_empty]
LocalPath = Annotated[Text, _local_path]
PathOrURL = Annotated[Text, path_or_url]
Options = dict[str, Any]
"""Keyword arguments of a custom object."""
CustomObject = Annotated[Options, Parse(_object_table), _has_import_path]
"""A table with the import path of a class and its keyword arguments, or the path alone."""
PositiveInt = Annotated[int, Gt(0)]
NonNegativeInt = Annotated[int, Ge(0)]
MinusOneOrMore = Annotated[int, _minus_one_or_more]
FinitePositive = Annotated[float, finite, Gt(0.0)]
FiniteNonNegative = Annotated[float, finite, Ge(0.0)]
Fraction = Annotated[float, Ge(0.0), Le(1.0)]

# --- values ------------------------------------------------------------------------------------


def convert(value: object, annotation: Any) -> Any:
    """Return a TOML value as the type of an annotation.

    Raises:
        ValueError: States the rule that the value breaks.
    """
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Annotated:
        inner, metadata = arguments[0], arguments[1:]
        for one in metadata:
            if isinstance(one, Parse):
                value = one.function(value)
        value = convert(value, inner)
        for one in metadata:
            if value is not None:
                _check(value, one)
        return value
    if origin in UNIONS:
        return None if value is None else convert(value, arguments[0])
    if origin is Literal:
        if value not in arguments:
            names = ", ".join(arguments)
            raise ValueError(f"must be one of {names}{did_you_mean(str(value), arguments)}")
        return value
    if origin is tuple:
        items = value if isinstance(value, (list, tuple)) else [value]
        return tuple(_item(one, arguments[0], name=n) for n, one in enumerate(items, start=1))
    if origin is dict:
        if not isinstance(value, dict):
            raise ValueError("must be a table")
        return {
            convert(key, arguments[0]): _item(one, arguments[1], name=literal(key))
            for key, one in value.items()
        }
    if annotation is Any:
        return value
    if is_dataclass(annotation):
        return _convert_table(value, annotation)
    if type(value) is not annotation and not (annotation is float and type(value) is int):
        raise ValueError(f"must be {SCALARS[annotation]}")
    if isinstance(value, str) and "\0" in value:
        raise ValueError("must not hold the character NUL (\\u0000)")
    if annotation is float and isinstance(value, int):
        try:
            return float(value)
        except OverflowError:
            raise ValueError("must be a finite number") from None
    return value


def _item(value: object, annotation: Any, *, name: object) -> Any:
    try:
        return convert(value, annotation)
    except ValueError as error:
        raise ValueError(f"item {name}: {error}") from error


def _convert_table(value: object, cls: Any) -> Any:
    if not isinstance(value, dict):
        # an instance is what a default or Python has
        if isinstance(value, cls):
            return value
        raise ValueError("must be a table, {key = value}")
    known = keys(cls)
    for name in value:
        if (name,) not in known:
            names = [path[0] for path in known]
            guess = did_you_mean(name, names) or f"; valid keys are {', '.join(names)}"
            raise ValueError(f"has no key {name!r}{guess}")
    converted = {}
    for (name,), key in known.items():
        if name in value:
            try:
                converted[name] = key.convert(value[name])
            except ValueError as error:
                raise ValueError(f"{name} {error}") from error
        elif key.default is MISSING:
            raise ValueError(f"needs the key {name}")
    return cls(**converted)


def _check(value: Any, metadata: object) -> None:
    if callable(metadata):
        metadata(value)
    for cls, name, holds, _, words in BOUNDS:
        if isinstance(metadata, cls) and not holds(value, limit := getattr(metadata, name)):
            raise ValueError(f"must be {words} {str(limit).removesuffix('.0')}")


def same(left: object, right: object) -> bool:
    """Compare two TOML values. 1 equals 1.0, but not true."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def as_table(value: object) -> object:
    """Return a value as TOML writes it: lists, and tables without keys that are None."""
    if is_dataclass(value):
        value = {one.name: getattr(value, one.name) for one in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {key: as_table(item) for key, item in value.items() if item is not None}
    return [as_table(item) for item in value] if isinstance(value, (list, tuple)) else value


def literal(value: object) -> str:
    """Write a value as TOML does, and None as `none`."""
    value = as_table(value)
    if value is None:
        return "none"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(literal, value))}]"
    if isinstance(value, dict):
        items = (f"{_toml_key(key)} = {literal(item)}" for key, item in value.items())
        return f"{{{', '.join(items)}}}"
    return str(value)


def _toml_key(key: str) -> str:
    is_bare = key.isascii() and key.replace("-", "_").isidentifier()
    return key if is_bare else literal(key)


# --- keys --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Key:
    """One key of a tree.

    Args:
        annotation: Type with its metadata.
        default: `dataclasses.MISSING` if it must be given.
        source: Class whose source has the docstring under the field, and a remark to add to it.
    """

    name: str
    annotation: Any
    default: object
    source: tuple[type, str]
    kind: type
    """str, int, float, bool, tuple or dict."""
    item: Any
    """Innermost type: str, int, float, bool, or the dataclass of a list of tables."""
    is_nested: bool
    """Whether it is a list of lists."""
    choices: tuple[str, ...]
    optional: bool
    metadata: tuple[Any, ...]

    def convert(self, value: object) -> Any:
        """Return a TOML value as the key's type; raises ValueError with the rule it breaks."""
        converted = convert(value, self.annotation)
        is_bounded = any(isinstance(one, (Lt, Le)) for one in self.metadata)
        if isinstance(converted, int) and not is_bounded and abs(converted) > MAX_INT:
            raise ValueError(f"must be at most {MAX_INT}")
        return converted

    @property
    def requires(self) -> list[Requires]:
        """Other settings that it requires."""
        return [one for one in self.metadata if isinstance(one, Requires)]

    @property
    def replaces(self) -> list[str]:
        """Keys of its section that it replaces."""
        return [key for one in self.metadata if isinstance(one, Replaces) for key in one.keys]

    @property
    def takes_import_path(self) -> bool:
        """Whether it may name custom code."""
        is_table = _has_import_path in self.metadata
        return is_table or any(isinstance(one, ImportPath) for one in self.metadata)

    @property
    def unset_by_none(self) -> bool:
        """Whether `none` on the command line restores its default."""
        return self.optional or self.kind in (tuple, dict)

    @property
    def bounds(self) -> str:
        """Numeric bounds, such as `> 0`."""
        found = [
            f"{sign} {getattr(one, name)}"
            for one in self.metadata
            for cls, name, _, sign, _ in BOUNDS
            if isinstance(one, cls)
        ]
        return " and ".join(found)

    @property
    def type_text(self) -> str:
        """Type and bounds, such as `int > 0` or `list of str`."""
        if self.kind is dict:
            return "table of any keys"
        name = " | ".join(self.choices) or self.item.__name__
        if self.takes_import_path:
            name = " | ".join([*self.choices, "package.module:NAME"])
        if _has_import_path in self.metadata:
            name = '{path = "package.module:NAME", ...}'
        if is_dataclass(self.item):
            name = "tables"
        if self.kind is tuple:
            name = f"list of {'lists of ' if self.is_nested else ''}{name}"
        return f"{name} {self.bounds}".rstrip()


def keys(tree: Any) -> Mapping[Path, Key]:
    """Return every key of a tree by its path."""
    return _walk(tree)[0]


def sections(tree: Any) -> Mapping[Path, type]:
    """Return every section of a tree by its path, nested ones included."""
    return _walk(tree)[1]


def value_at(config: object, path: Path) -> Any:
    """Return the section or value at a path."""
    return functools.reduce(getattr, path, config)


def values_of(config: object) -> dict[Path, object]:
    """Return every value of a tree by its path."""
    return {path: value_at(config, path) for path in keys(type(config))}


def import_paths(tree: Any, values: Mapping[Path, object]) -> list[tuple[Path, str]]:
    """Return each import path among values, with the key that holds it."""
    found = list[tuple[Path, str]]()
    for path, key in keys(tree).items():
        value = values.get(path) if key.takes_import_path else None
        for item in value if isinstance(value, (list, tuple)) else [value]:
            text = item.get("path") if isinstance(item, dict) else item
            if is_import_path(text):
                found.append((path, text))
    return found


@functools.cache
def section_fields(cls: Any) -> list[tuple[dataclasses.Field[Any], Any]]:
    """Return each field of a section with its annotation."""
    hints = typing.get_type_hints(cls, include_extras=True)
    return [(one, hints[one.name]) for one in dataclasses.fields(cls)]


@functools.cache
def _walk(tree: Any) -> tuple[dict[Path, Key], dict[Path, type]]:
    found: tuple[dict[Path, Key], dict[Path, type]] = ({}, {})
    for one, annotation in section_fields(tree):
        if is_dataclass(annotation):
            section = typing.cast(type, annotation)
            found[1][one.name,] = section
            inner_keys, inner_sections = _walk(section)
            found[0].update({(one.name, *path): key for path, key in inner_keys.items()})
            found[1].update({(one.name, *path): inner for path, inner in inner_sections.items()})
        else:
            found[0][one.name,] = _read_key(one, annotation, cls=tree)
    return found


def _read_key(one: dataclasses.Field[Any], annotation: Any, *, cls: type) -> Key:
    layers, metadata, choices, item = [], list[Any](), tuple[str, ...](), annotation
    while (origin := typing.get_origin(item)) is not None:
        arguments = typing.get_args(item)
        if (origin in UNIONS and arguments[1:] != (types.NoneType,)) or (
            origin is tuple and arguments[1:] != (...,)
        ):
            break
        layers.append(origin)
        if origin is Annotated:
            metadata += arguments[1:]
        elif origin is Literal:
            choices, arguments = arguments, (str,)
        item = arguments[-1] if origin is dict else arguments[0]
    if item not in (*SCALARS, Any) and not is_dataclass(item):
        raise TypeError(
            f"a field must be a number, bool, string, Literal, a tuple of these, or one of them or "
            f"None, and {one.name} is {annotation}"
        )
    for check in metadata:
        is_ours = isinstance(check, (Gt, Ge, Lt, Le, Parse, Requires, Replaces))
        if not is_ours and (isinstance(check, BaseMetadata) or not callable(check)):
            raise TypeError(
                f"metadata must be Gt, Ge, Lt, Le or a function that checks the value, and "
                f"{one.name} has {check}"
            )
    names = [name for check in metadata if isinstance(check, ImportPath) for name in check.names]
    default = one.default if one.default_factory is MISSING else one.default_factory()
    return Key(
        name=one.name,
        annotation=annotation,
        default=default,
        source=one.metadata.get("source", (cls, "")),
        kind=next((layer for layer in layers if layer in (dict, tuple)), item),
        item=item,
        is_nested=layers.count(tuple) > 1,
        choices=choices or tuple(names),
        optional=any(origin in UNIONS for origin in layers),
        metadata=tuple(metadata),
    )


# --- trees that grow ---------------------------------------------------------------------------


def with_sizes(section: type[T], of: type[DataclassInstance], *, remark: str) -> type[T]:
    """Return a subclass of a section with an optional key for each size of a model.

    Args:
        of: Dataclass of the sizes. Fields that are no scalar, that its metadata marks as
            "of_family" or that the section has already get no key.
        remark: Added to the docstring of each key.
    """
    hints, known = typing.get_type_hints(of), {path[0] for path in keys(section)}
    scalars = {int: PositiveInt, float: FiniteNonNegative, bool: bool, str: Text}
    added = []
    for one in dataclasses.fields(of):
        plain = [kind for kind in typing.get_args(hints[one.name]) if kind is not types.NoneType]
        kind: Any = scalars.get((plain or [hints[one.name]])[0])
        if kind is not None and one.name not in known and not one.metadata.get("of_family"):
            is_optional = kind is PositiveInt and bool(plain)  # 0 takes away the flavor's
            text = f"{remark} 0: the default." if is_optional else remark
            size = field(default=None, metadata={"source": (of, text)})
            added.append((one.name, (NonNegativeInt if is_optional else kind) | None, size))
    return _subclass(section, added)


def _subclass(cls: type[T], added: list[tuple[str, Any, Any]]) -> type[T]:
    namespace = {"__doc__": cls.__doc__, "__module__": cls.__module__}
    made = dataclasses.make_dataclass(
        cls.__name__, added, bases=(cls,), namespace=namespace, frozen=True, kw_only=True
    )
    return typing.cast(type[T], made)
