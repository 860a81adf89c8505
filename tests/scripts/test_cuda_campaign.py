"""The table of jobs, what is read of a profile and of a stack, and a campaign that continues."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from scripts import cuda_campaign
from scripts.cuda_campaign import JOBS
from torchtitan.job import load_config
from torchtitan.layout import find_layout


@pytest.mark.parametrize("name", JOBS)
def test_each_job_has_a_layout(name: str) -> None:
    ranks, words = JOBS[name]
    config = load_config(words)
    dims = find_layout(config, world_size=ranks).dims
    assert dims.world_size == ranks
    assert config.training.steps == 3
    assert config.metrics.log_freq > 3  # the second step reports nothing
    for axis in set(name.split()) & {"tp", "cp", "ep"}:
        assert getattr(dims, axis) > 1


LAUNCHER = """#!/bin/sh
sleep 60 & echo $! > FOLDER/rank
trap 'kill $!; wait; exit 1' TERM
wait
"""


def test_a_job_that_takes_too_long_leaves_no_rank(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    launcher = tmp_path / "launcher"
    launcher.write_text(LAUNCHER.replace("FOLDER", str(tmp_path)))
    launcher.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(launcher))
    found = cuda_campaign.run_job("fsdp", folder=tmp_path / "run", is_alone=False, seconds=1)
    assert (found["exit"], "--seconds" in found["error"]) == (-1, True)
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "rank").read_text()), 0)
