"""What a run starts from, as far as no ranks are needed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import seal, write_bytes
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import Checkpoint, ParameterFilter
from torchtitan.checkpoint.start import Comparison, resolve_step, start_from_own


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


def test_a_filter_excludes_patterns_and_what_the_source_has_none_of() -> None:
    into = {name: torch.zeros(1) for name in ("a.weight", "a.lora_a", "b.weight", "b.lora_a")}
    adapter = ParameterFilter(exclude=("b.*",), optional=lambda name: name.endswith("lora_a"))
    assert list(adapter.wanted(into, names=lambda: ["a.weight"])) == ["a.weight"]
    some = adapter.wanted(into, names=lambda: ["a.weight", "b.lora_a"])
    assert list(some) == ["a.weight", "a.lora_a"]


@pytest.mark.parametrize("path", [".", "run", "run/file", "nowhere"])
@pytest.mark.parametrize("load_step", [-1, 3])
def test_a_path_without_a_step_is_refused(path: str, load_step: int, tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    (tmp_path / "run" / "file").touch()
    path, how = tmp_path / path, {"subfolder": "checkpoint", "verifies": True, "group": None}
    with pytest.raises(CheckpointError, match=naming(path)):
        resolve_step(path, load_step=load_step, **how)
