"""The types of settings: a range of numbers, a list that may be written as one value, a path."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Annotated, Any, TypeVar

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
)
from pydantic_core import CoreSchema, core_schema

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import did_you_mean
from torchtitan.base.urls import is_url, url_problem

T = TypeVar("T")
STRICT = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)


def in_a_list(value: object) -> object:
    """Let one value stand for a list of one."""
    return value if isinstance(value, (list, tuple)) else (value,)


def _number_as_text(value: object) -> object:
    """Let a plain integer stand for its digits."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _split(value: object) -> object:
    """Let text with commas stand for a list."""
    return tuple(value.split(",")) if isinstance(value, str) else value


def _range(value: object) -> object:
    """Let text as "100-199" stand for a range."""
    first, dash, last = value.partition("-") if isinstance(value, str) else ("", "", "")
    return (int(first), int(last)) if dash and f"{first}{last}".isdecimal() else value


def named_or_number(*names: str) -> AfterValidator:
    """Allow one of the names, or a positive integer in digits."""

    def check(value: str) -> str:
        is_number = value.isascii() and value.isdecimal() and 0 < len(value.lstrip("0")) < 10
        if value in names or is_number:
            return value
        raise ValueError(
            f"must be {', '.join(names)} or a positive integer in quotes, as "
            f'"2"{did_you_mean(value, names)}'
        )

    return AfterValidator(check)


def _inside(what: str) -> Callable[[str], str]:
    def check(value: str) -> str:
        _path(value)
        parts = os.path.normpath(value).split(os.sep)
        if os.path.isabs(value) or parts[0] == ".." or (what == "file" and parts == ["."]):
            raise ValueError(
                f"must be a {what} inside job.dump_folder; write a name alone, and choose the "
                "place by job.dump_folder"
            )
        return value

    return check


def _path(value: str) -> str:
    if is_url(value):
        raise ValueError("must be a path, not a URL")
    return value


def _path_or_url(value: str) -> str:
    if is_url(value) and (problem := url_problem(value)):
        raise ValueError(problem)
    return value


def _folder_or_url(value: str) -> str:
    return _path_or_url(value) if is_url(value) else _inside("folder")(value)


def _minus_one_or_more(value: int) -> int:
    if value != -1 and value < 1:
        raise ValueError("must be -1 or at least 1")
    return value


class Own:
    """Lets a text name something of the user's own by import path, besides `names` of ours.

    With `others` any other text is left for a later check.
    """

    def __init__(self, *names: str, others: bool = False) -> None:
        self.names, self._others = names, others

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        return core_schema.no_info_after_validator_function(self._check, handler(source))

    def _check(self, value: str) -> str:
        if value in self.names or self._others or is_import_path(value):
            return value
        ours = f"one of {', '.join(self.names)}, or " if self.names else ""
        raise ValueError(
            f"must be {ours}an import path as my_package.my_module:NAME"
            f"{did_you_mean(value, self.names)}"
        )


Text = Annotated[str, Field(min_length=1)]
NumberOrText = Annotated[Text, BeforeValidator(_number_as_text)]
InnerFolder = Annotated[Text, AfterValidator(_inside("folder"))]
LocalPath = Annotated[Text, AfterValidator(_path)]
PathOrURL = Annotated[Text, AfterValidator(_path_or_url)]
FolderOrURL = Annotated[Text, AfterValidator(_folder_or_url)]
InnerFile = Annotated[Text, AfterValidator(_inside("file"))]
Degree = Annotated[int, Field(ge=1)]
MinusOneOrMore = Annotated[int, AfterValidator(_minus_one_or_more)]
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Share = Annotated[float, Field(gt=0.0, lt=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]
AtLeastOne = Annotated[float, Field(ge=1.0, allow_inf_nan=False)]
AboveOne = Annotated[float, Field(gt=1.0, allow_inf_nan=False)]
FinitePositive = Annotated[float, Field(gt=0.0, allow_inf_nan=False)]
FiniteNonNegative = Annotated[float, Field(ge=0.0, allow_inf_nan=False)]
ListOf = Annotated[tuple[T, ...], Field(strict=False), BeforeValidator(in_a_list)]
Strings = ListOf[Text]
ImportPaths = ListOf[Annotated[Text, Own()]]
ListsOfNames = ListOf[Annotated[ListOf[Text], BeforeValidator(_split)]]
Range = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...],
    Field(strict=False, min_length=2, max_length=2),
    BeforeValidator(_range),
]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
