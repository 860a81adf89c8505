"""No test of evaluation may reach a network."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest


def stay_offline(patch: pytest.MonkeyPatch, *, cache: Path) -> None:
    """Let the harness read local files alone, and say little."""
    import datasets

    patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
    patch.setattr(datasets.config, "HF_DATASETS_CACHE", cache)
    patch.setattr(logging.getLogger("lm_eval"), "level", logging.ERROR)


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stay_offline(monkeypatch, cache=tmp_path / "datasets")
