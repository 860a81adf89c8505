"""What a tree of settings says of each key, by path: type, bounds, default, documentation, needs.

A tree is a frozen pydantic dataclass whose fields are values or such dataclasses again, its
sections. pydantic keeps all of it for its own checks; here it is laid out flat for the command
line, for `--help`, and for the search of the nearest valid name, so that none repeats the tree.
"""

from __future__ import annotations

import functools
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass
from types import NoneType, UnionType

from annotated_types import Ge, Gt, Le, Lt
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from torchtitan.config.layers import Path, literal
from torchtitan.config.needs import InsteadOf, Needs
from torchtitan.config.types import Own

DECLARED = (Needs, InsteadOf, Own)
LIMITS = ((Gt, "gt", ">"), (Ge, "ge", ">="), (Lt, "lt", "<"), (Le, "le", "<="))


@dataclass(frozen=True)
class FieldFacts:
    """One key of the tree."""

    kind: type
    """str, int, float, bool, tuple (of strings, floats or tables) or dict (a table of any keys)."""
    item: type
    """What a tuple holds, in the end: of a table its dataclass; `kind` again for the others."""
    nested: bool
    """Whether a tuple holds tuples."""
    choices: tuple[str, ...]
    bounds: str
    optional: bool
    default: object
    help: str
    declared: tuple[object, ...]
    """Needs, InsteadOf and Own."""

    @property
    def needs(self) -> list[Needs]:
        """What it needs of other settings."""
        return [said for said in self.declared if isinstance(said, Needs)]

    @property
    def instead_of(self) -> list[str]:
        """The siblings that say the same in another way."""
        return [key for said in self.declared if isinstance(said, InsteadOf) for key in said.keys]

    @property
    def may_be_own(self) -> bool:
        """Whether it may name something of the user's own."""
        return any(isinstance(said, Own) for said in self.declared)

    @property
    def type_text(self) -> str:
        """Name the type and its limits, as `int > 0` or `list of str`."""
        name = " | ".join(self.choices) or self.item.__name__
        if self.may_be_own:
            name = " | ".join([*self.choices, "package.module:NAME"])
        if self.kind is dict:
            name = "table of any keys"
        if is_dataclass(self.item):
            name = "tables"
        if self.kind is tuple:
            name = f"list of {'lists of ' if self.nested else ''}{name}"
        return f"{name} {self.bounds}".rstrip()

    @property
    def text(self) -> str:
        """Describe the key as --help does: meaning, type, default and needs."""
        default = "not set" if self.default is None else literal(self.default)
        required = self.default is PydanticUndefined
        parts = [self.type_text, "required" if required else f"default: {default}"]
        for need in self.needs:
            of = " or ".join(map(literal, need.of))
            parts.append(f"{of} needs {need.text}".lstrip())
        keys = "".join(f" {key}: {facts.text}" for key, facts in self.keys.items())
        return f"{self.help} ({'; '.join(parts)}){keys}"

    @property
    def keys(self) -> Mapping[str, FieldFacts]:
        """The keys of each table, in a list of tables."""
        if not is_dataclass(self.item):
            return {}
        return {path[0]: facts for path, facts in fields(self.item).items()}

    @property
    def unset_by_none(self) -> bool:
        """Whether a bare `none` on the command line means "as if not given"."""
        return self.optional or self.kind in (tuple, dict)


def sections(tree: type) -> Mapping[Path, type]:
    """Every section of the tree, nested ones included; the whole, (), is not among them."""
    return _laid_out(tree)[0]


def fields(tree: type) -> Mapping[Path, FieldFacts]:
    """Every key of the tree."""
    return _laid_out(tree)[1]


def value_at(config: object, path: Path) -> typing.Any:
    """Return the section or value that stands at a path."""
    return functools.reduce(getattr, path, config)


def values_of(config: object) -> dict[Path, object]:
    """Lay the values of a tree out flat."""
    return {path: value_at(config, path) for path in fields(type(config))}


def section_fields(cls: type) -> Mapping[str, FieldInfo]:
    """Return pydantic's description of one section's keys."""
    found: Mapping[str, FieldInfo] = cls.__pydantic_fields__  # type: ignore[attr-defined]
    return found


@functools.cache
def _laid_out(tree: type) -> tuple[Mapping[Path, type], Mapping[Path, FieldFacts]]:
    found = list(_walk(tree, ()))
    return (
        {path: value for path, value in found if isinstance(value, type)},
        {path: value for path, value in found if isinstance(value, FieldFacts)},
    )


def _walk(cls: type, prefix: Path) -> Iterator[tuple[Path, type | FieldFacts]]:
    for name, info in section_fields(cls).items():
        path = (*prefix, name)
        if isinstance(info.annotation, type) and is_dataclass(info.annotation):
            yield path, info.annotation
            yield from _walk(info.annotation, path)
        else:
            yield path, _facts(info)


def _facts(info: FieldInfo) -> FieldFacts:
    said: list[object] = list(info.metadata)
    annotation: typing.Any = info.annotation
    depth, optional, choices = 0, False, ()
    while (origin := typing.get_origin(annotation)) is not None:
        first, *others = typing.get_args(annotation)
        if origin is typing.Annotated:
            for one in others:  # a Field() inside holds a list of limits of its own
                said += one.metadata if isinstance(one, FieldInfo) else [one]
        elif origin in (typing.Union, UnionType):
            assert others == [NoneType]
            optional = True
        elif origin is typing.Literal:
            choices, first = (first, *others), str
        elif origin is dict:
            annotation = dict
            break
        else:
            assert origin is tuple
            depth += 1
        annotation = first
    own = [name for one in said if isinstance(one, Own) for name in one.names]
    return FieldFacts(
        kind=tuple if depth else annotation,
        item=annotation,
        nested=depth > 1,
        choices=tuple(choices) or tuple(own),
        bounds=_bounds(said),
        optional=optional,
        default=info.get_default(call_default_factory=True),
        help=" ".join((info.description or "").split()),
        declared=tuple(one for one in said if isinstance(one, DECLARED)),
    )


def _bounds(said: list[object]) -> str:
    """Write the numeric limits, `> 0` and the like."""
    found = [
        f"{sign} {getattr(limit, name)}"
        for limit in said
        for cls, name, sign in LIMITS
        if isinstance(limit, cls)
    ]
    return " and ".join(found)
