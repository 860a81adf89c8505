"""Check the types of settings that Python code has built or changed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.config.schema import Path, keys, literal, sections, value_at

T = TypeVar("T")


def with_types(config: T) -> T:
    """Return settings that Python code has built or changed with values of the keys' types.

    A dataclass checks and converts nothing: one path would stay a string where a tuple is due.

    Raises:
        ConfigError: A section has the wrong type, or lists each value that has.
    """
    for path, cls in sections(type(config)).items():  # outer sections come before inner ones
        if not isinstance(section := value_at(config, path), cls):
            rule = f"must be a {cls.__name__}, got {literal(section)[:60]}"
            raise ConfigError.at(".".join(path), rule)
    values, wrong = {}, []
    for path, key in keys(type(config)).items():
        value = value_at(config, path)
        try:
            values[path] = key.convert(value)
        except ValueError as error:
            wrong.append(Violation((".".join(path),), f"{error}, got {literal(value)}"))
    if wrong:
        raise ConfigError(wrong)
    return _with_values(config, values)


def _with_values(section: T, values: Mapping[Path, object]) -> T:
    inner: dict[str, dict[Path, object]] = defaultdict(dict)
    for path, value in values.items():
        inner[path[0]][path[1:]] = value
    changed = {
        name: found[()] if () in found else _with_values(getattr(section, name), found)
        for name, found in inner.items()
    }
    return replace(section, **changed)  # type: ignore[type-var]
