"""Makes keys of a section from the fields of a plain dataclass: each may be given, or left out.

So a size of a model is declared once, where the model reads it, with its meaning.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import BeforeValidator, ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.fields import section_fields
from torchtitan.config.types import STRICT, FiniteNonNegative, Text, in_a_list

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S")
_NO_DOCSTRINGS = ConfigDict(**{**STRICT, "use_attribute_docstrings": False})
_BOUNDED: Mapping[object, object] = {
    int: PositiveInt,
    float: FiniteNonNegative,
    bool: bool,
    str: Text,
}
"""The type of a key by the type of a field."""


def with_overrides(section: type[S], of: type[DataclassInstance], *, remark: str) -> type[S]:
    """Return a section with a key more for each field of `of` that is a number, switch or text.

    A key that is not given is None; `remark` is added to the text of each. Keys that `section` has
    itself stay as they are; fields of another type, and those whose metadata has "of_family",
    become none.
    """
    hints, docs = typing.get_type_hints(of), _docstrings(of)
    added: dict[str, Any] = {}
    for field in dataclasses.fields(of):
        kind = hints[field.name]
        plain = [one for one in typing.get_args(kind) if one is not types.NoneType] or [kind]
        bounded = _BOUNDED.get(plain[0])
        is_size = bounded is not None and not field.metadata.get("of_family")
        if is_size and field.name not in section_fields(section):
            added[field.name] = bounded

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= dict.fromkeys(added)
        namespace["__annotations__"] = {name: kind | None for name, kind in added.items()}
        namespace["__doc__"], namespace["__module__"] = section.__doc__, section.__module__

    plain_class = types.new_class(section.__name__, (section,), {}, fill)
    made = dataclass(frozen=True, kw_only=True, config=_NO_DOCSTRINGS)(plain_class)
    for name, info in section_fields(made).items():
        own = section_fields(section).get(name)
        info.description = (
            f"{docs.get(name, '')} {remark}".strip() if own is None else own.description
        )
    return typing.cast(type[S], made)


def with_sections(tree: type[S], sections: Mapping[str, type]) -> type[S]:
    """Return a tree with sections more, or in the place of its own of that name."""

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {name: Field(default_factory=cls) for name, cls in sections.items()}
        namespace["__annotations__"] = dict(sections)
        namespace["__doc__"], namespace["__module__"] = tree.__doc__, tree.__module__

    plain = types.new_class(tree.__name__, (tree,), {}, fill)
    made = dataclass(frozen=True, kw_only=True, config=_NO_DOCSTRINGS)(plain)
    return typing.cast(type[S], made)


def strict_section(section: Any, *, running: Callable[[], AbstractContextManager[None]]) -> type:
    """Return a plain dataclass as a section: with strict types, and its docstrings as help. Its
    `__post_init__` runs inside of `running()`.

    Raises:
        TypeError: It is no dataclass, a field has no default, or a type that no setting can have.
    """
    if not (isinstance(section, type) and dataclasses.is_dataclass(section)):
        raise TypeError(f"a section must be a dataclass, got {section!r}")
    hints, docs = typing.get_type_hints(section, include_extras=True), _docstrings(section)
    defaults: dict[str, Any] = {}
    for one in dataclasses.fields(section):
        if one.default is one.default_factory is dataclasses.MISSING:
            raise TypeError(f"each field of a section needs a default, and {one.name} has none")
        if not _is_settable(hints[one.name]):
            raise TypeError(
                f"a field must be a number, switch, text, Literal, a tuple of these, or one of "
                f"them or None, and {one.name} is {hints[one.name]}"
            )
        defaults[one.name] = one.default
        if one.default_factory is not dataclasses.MISSING:
            defaults[one.name] = Field(default_factory=one.default_factory)

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= defaults
        namespace["__annotations__"] = {
            name: typing.Annotated[hint, Field(strict=False), BeforeValidator(in_a_list)]
            if typing.get_origin(hint) is tuple
            else hint
            for name, hint in hints.items()
            if name in defaults
        }
        namespace["__doc__"], namespace["__module__"] = section.__doc__, section.__module__
        if hasattr(section, "__post_init__"):
            namespace["__post_init__"] = post_init

    def post_init(self: Any) -> None:
        with running():
            section.__post_init__(self)  # type: ignore[attr-defined]

    plain = types.new_class(section.__name__, (section,), {}, fill)
    is_frozen = section.__dataclass_params__.frozen  # type: ignore[attr-defined]
    made = dataclass(frozen=is_frozen, kw_only=True, config=_NO_DOCSTRINGS)(plain)
    for name, info in section_fields(made).items():
        info.description = docs.get(name)
    return made


def _is_settable(hint: object) -> bool:
    if hint in (str, int, float, bool, types.NoneType, ...):
        return True
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _is_settable(arguments[0])
    if origin is typing.Literal:
        return all(isinstance(one, str) for one in arguments)
    is_pair = len(arguments) == 2 and all(map(_is_settable, arguments))
    if origin in (typing.Union, types.UnionType):
        return is_pair and arguments[1] is types.NoneType
    return origin is tuple and is_pair and arguments[1] is ...


def given_overrides(section: object, of: type[DataclassInstance]) -> dict[str, Any]:
    """Return the fields of `of` for which a section has a value."""
    names = [field.name for field in dataclasses.fields(of) if hasattr(section, field.name)]
    values = {name: getattr(section, name) for name in names}
    return {
        name: value
        for name, value in values.items()
        if value is not None and not dataclasses.is_dataclass(value)
    }


def _docstrings(cls: type) -> dict[str, str]:
    """Return the text under each field, of the classes it inherits from too."""
    found: dict[str, str] = {}
    for base in reversed([base for base in cls.__mro__ if dataclasses.is_dataclass(base)]):
        try:
            [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        except (OSError, TypeError):  # a class that no file has
            continue
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    found[name] = inspect.cleandoc(doc)
    return found
