"""What a rule across settings says where it does not hold."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold: the keys that it ties, the first one to blame, and what to do."""

    keys: tuple[str, ...]
    rule: str
