"""What the tests of whole jobs share."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tokenised data, the same for all tests of a file."""
    return tmp_path_factory.mktemp("cache")
