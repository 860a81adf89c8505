from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.jobs import Jobs


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Jobs:
    """A folder for job files, which is the working directory too."""
    monkeypatch.chdir(tmp_path)
    return Jobs(tmp_path)
