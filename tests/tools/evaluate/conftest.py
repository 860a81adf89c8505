"""No test of evaluation may reach a network."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.evaluate.helpers import stay_offline


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stay_offline(monkeypatch, cache=tmp_path / "datasets")
