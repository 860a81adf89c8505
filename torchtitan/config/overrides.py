"""Makes settings of plain dataclasses: keys of a section, and sections of the user's own.

So a size of a model is declared once, where the model reads it, with its meaning.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ConfigDict, Field, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.fields import section_fields
from torchtitan.config.types import STRICT, FinitePositive

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

S = TypeVar("S")
_NO_DOCSTRINGS = ConfigDict(**{**STRICT, "use_attribute_docstrings": False})
_BOUNDED: Mapping[object, object] = {int: PositiveInt, float: FinitePositive, bool: bool}
"""The type of a key by the type of a field: numbers are positive."""


def with_overrides(section: type[S], of: type[DataclassInstance], *, remark: str) -> type[S]:
    """Return a section with a key more for each field of `of` that is a number or a switch.

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
        info.description = f"{docs.get(name, '')} {remark}" if own is None else own.description
    return typing.cast(type[S], made)


def with_sections(tree: type[S], added: Mapping[str, type]) -> type[S]:
    """Return a tree with sections more, or others in the place of its own.

    A section that is a plain dataclass is checked as strictly as ours. Each field needs a default.

    Raises:
        TypeError: A section is no dataclass, or has a field of a type that TOML does not have.
    """
    strict = {name: _strict(section) for name, section in added.items()}

    def fill(namespace: dict[str, Any]) -> None:
        namespace |= {name: Field(default_factory=section) for name, section in strict.items()}
        namespace["__annotations__"] = dict(strict)
        namespace["__doc__"], namespace["__module__"] = tree.__doc__, tree.__module__

    plain = types.new_class(tree.__name__, (tree,), {}, fill)
    made = dataclass(frozen=True, kw_only=True, config=_NO_DOCSTRINGS)(plain)
    return typing.cast(type[S], made)


def _strict(section: type) -> type:
    if not dataclasses.is_dataclass(section):
        raise TypeError(f"a section must be a dataclass, got {section!r}")
    if hasattr(section, "__pydantic_fields__"):
        return section
    docs, hints = _docstrings(section), typing.get_type_hints(section)
    needed = [
        one.name
        for one in dataclasses.fields(section)
        if one.default is one.default_factory is dataclasses.MISSING
    ]
    if needed:
        raise TypeError(f"each field of a section needs a default, and {needed[0]} has none")

    def fill(namespace: dict[str, Any]) -> None:
        lists = {name for name, hint in hints.items() if typing.get_origin(hint) is tuple}
        namespace["__annotations__"] = {  # TOML has lists alone
            name: typing.Annotated[hints[name], Field(strict=False)] for name in lists
        }
        namespace |= {
            one.name: one.default for one in dataclasses.fields(section) if one.name in lists
        }
        namespace["__doc__"], namespace["__module__"] = section.__doc__, section.__module__

    plain = types.new_class(section.__name__, (section,), {}, fill)
    made = dataclass(frozen=True, kw_only=True, config=_NO_DOCSTRINGS)(plain)
    for name, info in section_fields(made).items():
        info.description = docs.get(name)
    return made


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
        [tree] = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            match field, text:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(doc))),
                ):
                    found[name] = inspect.cleandoc(doc)
    return found
