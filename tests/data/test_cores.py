"""How many cores a process may use."""

from __future__ import annotations

import os
import sys

import pytest

from torchtitan.data.prepare import num_cores


def test_cores_of_this_process_not_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 192)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5, 7}, raising=False)
    assert num_cores() == 3


@pytest.mark.parametrize(("counted", "cores"), [(10, 10), (None, 1)])
def test_cores_where_no_process_is_bound_to_some(
    counted: int | None, cores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on macOS."""
    monkeypatch.setattr(os, "cpu_count", lambda: counted)
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert num_cores() == cores
