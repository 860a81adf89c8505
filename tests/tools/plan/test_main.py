"""The commands: their text, their devices and their refusals."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.distributed.jobs import places_of_ranks, write_job
from tests.jobs import UNSAVED
from tests.tools.plan.jobs import PP2, planned
from torchtitan.base.errors import ConfigError
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import DEVICES, find_device

ROOT = Path(__file__).parents[3]
ZBV = ["schedule", "--schedule=ZBVZeroBubble", "--microbatches=8"]
MEMORY = ["memory", "--world_size=4"]


def test_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ZBV, "--pp=4", "--stages=8"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("ZBVZeroBubble, 4 ranks, 8 stages, 8 microbatches: bubble 6.25%")
    assert " 51 times a forward" in out
    assert main(["schedule", "--schedule=1F1B", "--microbatches=8", "--pp=4"]) == 0
    assert capsys.readouterr().out.startswith("1F1B, 4 ranks, 4 stages, 8 microbatches")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["schedule"], ["--schedule", "--microbatches", "--pp"]),
        (["schedule", "--schedule=ZBV", "--microbatches=8", "--pp=4"], ["'ZBV'", "ZBVZeroBubble"]),
        ([*ZBV, "--pp=4", "--stages=9"], ["--stages", "got 9"]),
        ([*ZBV, "--pp=4", "--training.steps=3"], ["--training.steps"]),
        (["memory"], ["--world_size"]),
        ([*MEMORY, "--gpus=64"], ["--gpus"]),
        (["memory", "--world_size=0"], ["got 0"]),
        ([*MEMORY, "--device=H10"], ["H10"]),
        (["memory", "--world_size=3", PP2], ["pipeline_parallel_degree"]),
        ([*MEMORY, "--training.step=3"], ["steps"]),
        ([*MEMORY, "--optimizer.name=Muon"], ["[optimizer] name"]),
        (
            [*MEMORY, "--compile.enable", "--activation_checkpoint.mode=memory_budget"],
            ["[activation_checkpoint] mode"],
        ),
    ],
)
def test_refusals(
    arguments: list[str], parts: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path)  # writes the file
    job = [f"--job.config_file={tmp_path / 'job.toml'}"] if arguments[0] == "memory" else []
    assert main([*arguments, *job]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert [part for part in parts if part not in captured.err] == []


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


SHARE = {"worst": 0.5, "best": 0.9}
CONSTANTS: dict[str, Any] = {
    "product": "NVIDIA H100 80GB HBM3",
    "memory": 85_000_000_000,
    **dict.fromkeys(("products", "attention", "passes", "launch"), SHARE),
}
SPOILT = (
    {"product": "NVIDIA Unheard 9"},
    {"memory": -1},
    {"passes": {"worst": "fast", "best": 0.9}},
    {"passes": {"worst": 0.5, "best": float("nan")}},
    {"launch": {"worst": 1e-5}},
    {"launch": None},
)


@pytest.mark.parametrize(
    "content", ["{", "[1]", *(json.dumps(CONSTANTS | spoilt) for spoilt in SPOILT)]
)
def test_impossible_constants_are_refused(content: str, tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(content)
    with pytest.raises(ConfigError, match="--device"):
        find_device(str(file), memory_gib=None)


def test_names_and_constants(tmp_path: Path) -> None:
    file = tmp_path / "constants.json"
    file.write_text(json.dumps(CONSTANTS))
    device = find_device(str(file), memory_gib=None)
    assert (device.name, device.memory) == ("H100", 85_000_000_000)
    assert (device.passes.worst, device.passes.best) == (0.5, 0.9)
    for name in ("H100", "NVIDIA H100 80GB HBM3"):
        assert find_device(name, memory_gib=None) is DEVICES["H100"]
    assert find_device("H100-500W", memory_gib=None) is DEVICES["H100-500W"]
    assert find_device("H100", memory_gib=94).memory == 94 * 2**30
    for size in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ConfigError, match=f"--memory_gib.*got {size:g}"):
            find_device("H100", memory_gib=size)


class Small(TorchDispatchMode):
    """A callback that pretends a device with little memory: operator 100 is out of memory."""

    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        if self.num_calls == 100:  # once is enough
            raise torch.OutOfMemoryError("the device is full")
        return func(*args, **(kwargs or {}))

    def on_start(self, run: Any) -> None:
        self.__enter__()

    def on_end(self, reason: str | None) -> None:
        self.__exit__(None, None, None)


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.long
def test_a_run_out_of_memory_prints_a_command_that_plans_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two ranks of a pipeline, which wraps a stage's error in its own."""
    job = [*write_job(tmp_path), UNSAVED, f"--training.callbacks={__name__}:Small", PP2]
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
    assert arguments[1:] == ["--world_size=2", "--gpus_per_node=2", *job]
    assert main(arguments) == 0
    assert "live at the peak" in capsys.readouterr().out
