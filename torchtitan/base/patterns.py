"""Shell patterns that stand for parameters and modules: one matcher for all settings."""

from __future__ import annotations

import difflib
from collections.abc import Collection
from fnmatch import fnmatchcase

from torchtitan.base.errors import ConfigError


def matches(name: str, patterns: Collection[str]) -> bool:
    """Return whether any of the patterns matches the whole name; a star spans dots."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def check_pattern(pattern: str, names: Collection[str], *, key: str, what: str) -> None:
    """Check that a shell pattern, given under `key`, matches something.

    Raises:
        ConfigError: It does not; says which names are near.
    """
    if any(matches(name, [pattern]) for name in names):
        return
    near = sorted(sorted(names), key=lambda name: _likeness(pattern, name), reverse=True)[:3]
    raise ConfigError.at(
        key, f"'{pattern}' must match a {what} of the model; near are {', '.join(near)}"
    )


def _likeness(pattern: str, name: str) -> tuple[int, float]:
    """Compare what they share in one piece, as a pattern is shorter than any name, then letters."""
    matcher = difflib.SequenceMatcher(None, pattern, name)
    return matcher.find_longest_match().size, matcher.ratio()
