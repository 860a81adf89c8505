"""The table of jobs, what is read of a profile and of a stack, and a campaign that continues."""

from __future__ import annotations

import json
import os
import sys
import traceback
from pathlib import Path

import pytest
import torch

from scripts import cuda_campaign
from scripts.cuda_campaign import JOBS, ROOT, Figures, count_launches, notes_of, our_line, table_of
from torchtitan.base.errors import UserError
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


def test_launches_are_those_of_either_interface() -> None:
    names = ["cudaLaunchKernel", "cuLaunchKernelEx", "cudaLaunchKernelExC", "aten::mm", "memset"]
    assert count_launches(names) == 3


def test_a_wait_is_told_by_our_innermost_line() -> None:
    def frame(file: str, line: int) -> traceback.FrameSummary:
        return traceback.FrameSummary(file, line, "f")

    torch_file, ours = "/site-packages/torch/_tensor.py", f"{ROOT}/torchtitan/optim/clip.py"
    stack = [frame(ours, 1), frame(ours, 2), frame(torch_file, 3)]
    assert our_line(stack) == "optim/clip.py:2"
    assert our_line(stack[2:]) == "torch/_tensor.py:3"


def test_a_campaign_continues_and_fails_if_a_job_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, tried = tmp_path / "campaign.json", []
    results: dict[str, Figures] = {
        "plain": {
            "exit": 0,
            "seconds": 2.0,
            "launches": 7,
            "waits": {"a.py:1": 2, "b.py:3": 1},
            "recompiles": 0,
            "peak_gib": 1.25,
        },
        "fsdp": {"exit": 1, "seconds": 3.0, "error": "broken"},
        "8B, fsdp8": {"planned_gib": 90.0, "needed_gib": 92.0},
    }

    def measure(name: str, _: object) -> Figures:
        tried.append(name)
        return results[name]

    monkeypatch.setattr(cuda_campaign, "measure", measure)
    monkeypatch.setattr(cuda_campaign, "device_name", lambda _: "H100")
    command = ["--out", str(out), "--only", *results]
    assert cuda_campaign.main(command) == 1
    results["fsdp"] = {**results["plain"], "waits": {"b.py:3": 5}}
    assert cuda_campaign.main(command) == 0
    assert tried == [*results, "fsdp", "8B, fsdp8"]  # what succeeded is not run again
    found = json.loads(out.read_text())
    assert found["jobs"] == results
    assert (found["device"], found["torch"]) == ("H100", torch.__version__)
    head, *rows = table_of(results)
    by_column = [dict(zip(head, row, strict=True)) for row in rows]
    assert [row["waits"] for row in by_column] == ["3", "5", ""]
    assert [row["planned"] for row in by_column] == ["", "", "90.00"]
    assert notes_of(results) == ["a.py:1: plain 2", "b.py:3: plain 1, fsdp 5"]
    assert "1.25" in capsys.readouterr().out


def test_a_job_that_cannot_be_planned_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def unknown(*_: object, **__: object) -> None:
        raise UserError("unknown")

    monkeypatch.setattr(cuda_campaign, "find_device", unknown)
    monkeypatch.setattr(cuda_campaign, "device_name", lambda _: "H100")
    assert cuda_campaign.main(["--out", str(tmp_path / "out.json"), "--only", "8B, fsdp8"]) == 1


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
