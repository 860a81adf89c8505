"""A run that is out of memory prints the command that plans it, and exits with code 2."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed.jobs import places_of_ranks, write_job
from tests.jobs import UNSAVED
from torchtitan.tools.plan.command import main

ROOT = Path(__file__).parent.parent.parent.parent


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.long
def test_a_run_out_of_memory_prints_a_command_that_plans_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of a pipeline, which wraps a stage's error in its own."""
    job = [
        *write_job(tmp_path),
        UNSAVED,
        "--training.callbacks=tests.tools.plan.small_device:Small",
    ]
    job.append("--parallelism.pipeline_parallel_degree=2")
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "torchtitan.train", *job],
            env={**environ, **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places_of_ranks(2)
    ]
    said = [rank.communicate(timeout=150)[1] for rank in ranks]
    full = [text for rank, text in zip(ranks, said, strict=True) if rank.returncode == 2]
    assert full, said
    message = "".join(full)
    assert message.count("is out of memory: ") == len(full)  # each rank that is
    assert "the device is full" in message
    [command] = {line for line in message.splitlines() if line.startswith("python -m ")}
    module, verb, *arguments = shlex.split(command)[2:]
    assert (module, verb) == ("torchtitan", "plan")
    assert arguments[1:3] == ["--world_size=2", "--gpus_per_node=2"]
    assert arguments[3:] == job
    assert main(arguments) == 0
    text = capsys.readouterr().out
    assert "live at the peak" in text
