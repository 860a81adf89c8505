"""Rules of one key and between keys: the key that each mistake names, and what lies just inside."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from tests.config.jobs import loaded

LINES = Path(__file__).with_name("cases.txt").read_text("utf-8").splitlines()
CASES = [[part.strip() for part in line.split("|")] for line in LINES if not line.startswith("#")]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[2][:60])
def test_a_job(case: list[str]) -> None:
    outcome, key, options, *parts = case
    found = loaded("", *shlex.split(options))
    if outcome == "ok":
        assert found.mistakes == []
        return
    assert outcome == "mistake" or found.mistakes == []
    [message] = found.mistakes if outcome == "mistake" else found.notices
    assert message.startswith(f"command line: --{key}")
    assert all(part in message for part in " ".join(parts).split())
