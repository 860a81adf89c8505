"""What a message must name, in whatever words."""

from __future__ import annotations

import re


def naming(*values: object) -> re.Pattern[str]:
    """Match a message that holds each of these keys and values as whole words, in any order."""
    return re.compile("".join(f"(?=.*{_whole(str(value))})" for value in values), re.DOTALL)


def _whole(value: str) -> str:
    before, after = (r"(?<!\w)" * value[:1].isalnum(), r"(?!\w)" * value[-1:].isalnum())
    return before + re.escape(value) + after
