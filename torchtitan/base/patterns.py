"""Shell patterns for names of parameters and modules, matched the same way for all settings."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

from torchtitan.base.errors import ConfigError


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether any of the patterns matches the full name. A star also matches dots."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_pattern(pattern: str, names: Collection[str], *, key: str, noun: str) -> None:
    """Check that the pattern of setting `key` matches the name of a `kind`, e.g. a parameter; raise
    ConfigError if it matches nothing, with the most similar names."""
    if any(matches(name, [pattern]) for name in names):
        return
    similar = difflib.get_close_matches(pattern, sorted(names), n=3, cutoff=0.0)
    raise ConfigError.at(
        key, f"'{pattern}' must match a {noun} of the model; similar are {', '.join(similar)}"
    )
