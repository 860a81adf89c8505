"""What a run starts from, as far as no ranks are needed."""

from __future__ import annotations

from pathlib import Path

import pytest

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import seal, write_bytes
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.start import Comparison, start_from_own


def test_an_exclusion_that_was_applied_lets_no_other_settings_pass(tmp_path: Path) -> None:
    """The same command resumes; with another rate, it would be another training."""
    settings = CheckpointConfig(
        enable=True, initial_load_path="base", exclude_from_loading=("output.*",)
    )
    write_bytes(tmp_path / "manifest.json", seal({"step": 1}))
    own = Checkpoint(path=tmp_path, group=None)

    def start(*differences: str) -> str:
        comparison = Comparison(differences=differences, then=settings)
        return start_from_own(settings, own, compare=lambda manifest: comparison).mode

    assert start() == "recover"
    with pytest.raises(CheckpointError, match="lr"):
        start("lr")
