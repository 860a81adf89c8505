"""What a run starts from, as far as no ranks are needed."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import torch
import torch.distributed as dist

from tests.naming import naming
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import ParameterFilter
from torchtitan.checkpoint.start import Comparison, _start_from_own
from torchtitan.checkpoint.steps import resolve_step
from torchtitan.config.sources import to_toml
from torchtitan.job import load_config
from torchtitan.resume_rules import Job


def test_an_exclusion_that_was_applied_lets_no_other_settings_pass(tmp_path: Path) -> None:
    """The same command resumes; with another rate, it would be another training."""
    given = CheckpointConfig(
        enable=True, initial_load_path="base", exclude_from_loading=("output.*",)
    )
    same, other = (
        Comparison(differences=lines, then=given, is_longer=False) for lines in ((), ("lr",))
    )
    group = cast(dist.ProcessGroup, None)
    assert _start_from_own(given, tmp_path, comparison=same, group=group).mode == "recover"
    with pytest.raises(CheckpointError, match="lr"):
        _start_from_own(given, tmp_path, comparison=other, group=group)


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


def test_settings_that_were_stored_with_load_only_still_load() -> None:
    toml = to_toml(load_config([]))
    assert "load_only" not in toml
    for value in ("false", "true"):
        stored = toml.replace("[checkpoint]\n", f"[checkpoint]\nload_only = {value}\n")
        assert stored != toml
        if value == "false":
            assert Job.stored(stored).config == Job.stored(toml).config
        else:
            with pytest.raises(ConfigError, match=naming("load_only", "job.dump_folder")):
                Job.stored(stored)
