"""What a rule across settings says where it does not hold."""

from __future__ import annotations

import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Broken:
    """A rule that does not hold: the keys that it ties, the first one to blame, and what to do."""

    keys: tuple[str, ...]
    rule: str
    is_notice: bool = False
    """The job may start: what was set is worth a word, or has no effect while its switch is off."""


def leads_outside(name: str) -> bool:
    """Tell whether a path leads out of the folder that it is given in, be it there or not."""
    return os.path.isabs(name) or os.path.normpath(name).split(os.sep)[0] == ".."
