"""What the schema says of each key, by path: type, choices, bounds, default, documentation.

pydantic keeps all of it for its own checks; here it is laid out flat for the command line, for
`--help`, and for the search of the nearest valid name, so that none of them repeats the schema.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo

from torchtitan.config.layers import Path
from torchtitan.job import Config

LIMITS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


@dataclass(frozen=True)
class FieldFacts:
    """One key of the schema."""

    kind: type
    """str, int, float, bool or tuple (of strings or floats)."""
    item: type
    """What a tuple holds, in the end; `kind` again for the others."""
    nested: bool
    """Whether a tuple holds tuples."""
    choices: tuple[str, ...]
    bounds: str
    optional: bool
    default: object
    help: str

    @property
    def type_text(self) -> str:
        """Name the type and its limits, as `int > 0` or `list of str`."""
        if self.choices:
            return " | ".join(self.choices)
        name = self.item.__name__
        if self.kind is tuple:
            name = f"list of {'lists of ' if self.nested else ''}{name}"
        return f"{name} {self.bounds}".rstrip()

    @property
    def unset_by_none(self) -> bool:
        """Whether a bare `none` on the command line means "as if not given"."""
        return self.optional or self.kind is tuple


@functools.cache
def sections() -> Mapping[Path, type]:
    """Every section of the schema, nested ones included; the whole, (), is not among them."""
    return {path: value for path, value in _walk(Config, ()) if isinstance(value, type)}


@functools.cache
def fields() -> Mapping[Path, FieldFacts]:
    """Every key of the schema."""
    return {path: value for path, value in _walk(Config, ()) if isinstance(value, FieldFacts)}


def values_of(config: Config) -> dict[Path, object]:
    """Lay the values of a job out flat."""
    return {path: functools.reduce(getattr, path, config) for path in fields()}


def section_fields(cls: type) -> Mapping[str, FieldInfo]:
    """Return pydantic's description of one section's keys."""
    found: Mapping[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return found


def _walk(cls: type, prefix: Path) -> Iterator[tuple[Path, type | FieldFacts]]:
    for name, info in section_fields(cls).items():
        path = (*prefix, name)
        if isinstance(info.annotation, type) and is_dataclass(info.annotation):
            yield path, info.annotation
            yield from _walk(info.annotation, path)
        else:
            yield path, _facts(info)


def _facts(info: FieldInfo) -> FieldFacts:
    annotation, limits, optional = info.annotation, list(info.metadata), False
    if typing.get_origin(annotation) in (typing.Union, UnionType):
        (annotation,) = (arg for arg in typing.get_args(annotation) if arg is not NoneType)
        optional = True
    annotation, limits = _unwrap(annotation, limits=limits)
    kind = item = annotation
    choices: tuple[str, ...] = ()
    nested = False
    if typing.get_origin(annotation) is typing.Literal:
        choices, kind, item = typing.get_args(annotation), str, str
    elif typing.get_origin(annotation) is tuple:
        kind = tuple
        item, limits = _unwrap(typing.get_args(annotation)[0], limits=limits)
        if nested := typing.get_origin(item) is tuple:
            item, limits = _unwrap(typing.get_args(item)[0], limits=limits)
    return FieldFacts(
        kind=typing.cast(type, kind),
        item=typing.cast(type, item),
        nested=nested,
        choices=choices,
        bounds=_bounds(limits),
        optional=optional,
        default=info.default,
        help=" ".join((info.description or "").split()),
    )


def _unwrap(annotation: typing.Any, *, limits: list[object]) -> tuple[typing.Any, list[object]]:
    """Take an Annotated type apart; a Field() inside holds a list of limits of its own."""
    if typing.get_origin(annotation) is not typing.Annotated:
        return annotation, limits
    bare, *inner = typing.get_args(annotation)
    for limit in inner:
        limits = [*limits, *(limit.metadata if isinstance(limit, FieldInfo) else [limit])]
    return bare, limits


def _bounds(limits: list[object]) -> str:
    """Write the numeric limits, `> 0` and the like."""
    found = [
        f"{sign} {getattr(limit, name)}"
        for limit in limits
        for cls, name, sign in LIMITS
        if isinstance(limit, cls)
    ]
    return " and ".join(found)
