"""The commands: their text and their refusals."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.tools.plan.jobs import planned
from torchtitan.tools.plan.command import main

ZBV = ["--schedule", "ZBVZeroBubble", "--pp", "4", "--stages", "8", "--microbatches", "8"]


def run(capsys: pytest.CaptureFixture[str], arguments: Sequence[str]) -> tuple[int, str, str]:
    code = main(["schedule", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, ZBV)
    assert code == 0
    assert out.startswith("ZBVZeroBubble, 4 ranks, 8 stages, 8 microbatches: bubble 6.25%")
    assert " 51 times a forward" in out
    usual = run(capsys, ["--schedule", "1F1B", "--pp", "4", "--microbatches", "8"])[1]
    assert usual.startswith("1F1B, 4 ranks, 4 stages, 8 microbatches")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--schedule", "--microbatches", "--pp"]),
        (["--schedule", "ZBV", *ZBV[2:]], ["'ZBV'", "ZBVZeroBubble"]),
        ([*ZBV[:2], "--pp", "4", "--stages", "9", *ZBV[6:]], ["--stages", "got 9"]),
        ([*ZBV[:2], "--pp", "0", *ZBV[6:]], ["--pp", "0"]),
        ([*ZBV, "--training.steps=3"], ["--training.steps"]),
    ],
)
def test_refused_schedules(
    arguments: list[str], parts: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, arguments)
    assert (code, out) == (2, "")
    assert [part for part in parts if part not in err] == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([], ["--world_size"]),
        (["--world_size=4", "--gpus=64"], ["--gpus"]),
        (["--world_size=0"], ["got 0"]),
        (["--world_size=4", "--device=H10"], ["H10"]),
        (["--world_size=1", "--memory_gib=nan"], ["--memory_gib", "got nan"]),
        (["--world_size=3", "--parallelism.tensor_parallel_degree=2"], ["tensor_parallel_degree"]),
        (["--world_size=4", "--training.step=3"], ["steps"]),
        (["--world_size=4", "--optimizer.name=Muon"], ["[optimizer] name"]),
        (
            [
                *("--world_size=4", "--compile.enable"),
                "--activation_checkpoint.mode=memory_budget",
            ],
            ["[activation_checkpoint] mode"],
        ),
    ],
)
def test_refused_jobs(
    arguments: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path)  # writes the file
    assert main(["memory", f"--job.config_file={tmp_path / 'job.toml'}", *arguments]) == 2
    error = capsys.readouterr().err
    assert [part for part in parts if part not in error] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("verb", "pp", "parts"),
    [
        ("memory", 2, ["fits: H100 has 79.1 GiB", "pp 0", "pp 1", "optimizer", "2.00 GiB"]),
        ("traffic", 1, ["GiB of a rank in a step", "reduce-scatter", "fsdp"]),
        ("step", 1, ["what binds: host", "overlapped"]),
    ],
)
def test_commands(
    verb: str, pp: int, parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Ranks of a pipeline are rehearsed in processes of their own."""
    planned(tmp_path)  # writes the file
    job = ["--world_size=4", f"--job.config_file={tmp_path / 'job.toml'}"]
    assert main([verb, *job, f"--parallelism.pipeline_parallel_degree={pp}"]) == 0
    out = capsys.readouterr().out
    asked = main([verb, *job, "--memory_estimation.enable"])  # torchtitan's key for what it does
    assert asked == (0 if verb == "memory" else 2)
    dims = "pp 2 x dp_shard 2" if pp == 2 else "dp_shard 4"
    assert f"llama3 tiny8 on 4 x H100: {dims}; 8 x 64 tokens per rank" in out
    assert [part for part in parts if part not in out] == []
