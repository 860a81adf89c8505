"""Keys of a section that are the fields of a plain dataclass."""

from __future__ import annotations

import dataclasses

import pytest

from torchtitan.config.help import docstring_of
from torchtitan.config.schema import Key, keys, with_sizes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    width: int
    """Width of it."""
    share: float = 0.5
    """Share of it."""
    is_odd: bool = False
    own: int | None = None
    """Own one."""
    spare: int | None = None
    """Spare. Default: none."""
    fixed: bool = dataclasses.field(default=False, metadata={"of_family": True})
    """Nobody's to choose."""
    name: str = ""
    """Name of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class More(Sizes):
    depth: int = 2
    """Depth of it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Section:
    """A section."""

    own: int | None = None
    """The section's own."""


def test_numbers_and_switches_become_keys_with_their_text() -> None:
    facts = keys(with_sizes(Section, of=More, remark="Or not."))
    assert {path[0] for path in facts} == {
        *("own", "width", "share", "is_odd", "depth", "name", "spare")
    }
    assert docstring_of(facts["width",]) == "Width of it. Or not."
    assert docstring_of(facts["own",]) == "The section's own."
    assert docstring_of(facts["is_odd",]) == "Or not."
    assert (facts["width",].type_text, facts["share",].type_text) == ("int > 0", "float >= 0.0")
    assert facts["spare",].type_text == "int >= 0"
    assert docstring_of(facts["spare",]).startswith("Spare. Default: none. Or not. 0")
    assert all(fact.default is None and fact.optional for fact in facts.values())


def is_valid(key: Key, value: object) -> bool:
    try:
        key.convert(value)
    except ValueError:
        return False
    return True


@pytest.mark.parametrize("wrong", [{"width": 0}, {"width": 2.5}, {"share": -1.0}, {"fixed": True}])
def test_values_are_strict(wrong: dict[str, object]) -> None:
    section, [(name, value)] = with_sizes(Section, of=More, remark=""), wrong.items()
    assert (name,) not in keys(section) or not is_valid(keys(section)[name,], value)
