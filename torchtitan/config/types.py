"""The types of settings: a range of numbers, a list that may be written as one value."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, ConfigDict, Field

STRICT = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


def _in_a_list(value: object) -> object:
    """Let one plain string stand for a list of one."""
    return (value,) if isinstance(value, str) else value


def _number_in_a_list(value: object) -> object:
    """Let one plain number stand for a list of one."""
    return (value,) if isinstance(value, (float, int)) else value


def _number_as_text(value: object) -> object:
    """Let a plain integer stand for its digits."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _in_lists(value: object) -> object:
    """Let text with commas stand for a list of names, in a list of such lists."""
    if isinstance(value, str):
        value = (value,)
    if not isinstance(value, (list, tuple)):
        return value
    return tuple(tuple(item.split(",")) if isinstance(item, str) else item for item in value)


Text = Annotated[str, Field(min_length=1)]
NumberOrText = Annotated[Text, BeforeValidator(_number_as_text)]
Degree = Annotated[int, Field(ge=1)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
AtLeastOne = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]
AboveOne = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
FinitePositive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
FiniteNonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
Strings = Annotated[tuple[Text, ...], Field(strict=False), BeforeValidator(_in_a_list)]
Weights = Annotated[
    tuple[FinitePositive, ...], Field(strict=False), BeforeValidator(_number_in_a_list)
]
Names = Annotated[tuple[Text, ...], Field(strict=False)]
ListsOfNames = Annotated[tuple[Names, ...], Field(strict=False), BeforeValidator(_in_lists)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
