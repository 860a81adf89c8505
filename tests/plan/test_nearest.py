"""What does not fit is mended by the settings that are named, in a run out of memory too."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.distributed.jobs import places_of_ranks, write_job
from tests.plan.jobs import planned
from tests.plan.test_traffic import CP2, PP2, TP2
from torchtitan.base.device import GIB
from torchtitan.plan.__main__ import main
from torchtitan.plan.account import replay
from torchtitan.plan.devices import ALLOWANCE, DEVICES
from torchtitan.plan.nearest import Change, Found, _combine, propose
from torchtitan.plan.ran_out import find_cause, planning_command
from torchtitan.plan.records import rehearse_rank
from torchtitan.plan.step import StepTime
from torchtitan.plan.tried import Tried

ROOT = Path(__file__).parent.parent.parent
LARGE = [
    *("--model.dim=1024", "--model.hidden_dim=2816", "--model.num_layers=8"),
    *("--model.vocab_size=1024", "--training.seq_len=1024", "--training.local_batch_size=4"),
]
"""Large enough that memory is more than small change."""
SUGGESTED = re.compile(r"^ +([\d.]+) +[\d.e-]+-[\d.e-]+  (--.*)$", re.MULTILINE)


def suggested(text: str) -> list[list[str]]:
    return [found[1].split() for found in SUGGESTED.findall(text)]


@pytest.mark.parametrize(
    ("layout", "share"), [([TP2], 0.75), ([PP2], 0.75), ([CP2], 0.3)], ids=["tp", "pp", "cp"]
)
def test_the_first_suggestion_fits(
    layout: list[str], share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With less memory than one change saves, several are combined."""
    planned(tmp_path, world=1)
    job = [
        "memory",
        "--world_size=4",
        "--gpus_per_node=4",
        f"--job.config_file={tmp_path}/job.toml",
    ]
    job += [*LARGE, *layout]
    assert main(job) == 0
    text = capsys.readouterr().out
    assert "fits: " in text
    assert not suggested(text)
    reserved = re.search(r"reserved by torch +([\d.]+) GiB", text)
    assert reserved is not None
    small = f"--memory_gib={ALLOWANCE / GIB + share * float(reserved[1]):.3f}"
    assert main([*job, small]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    options = suggested(text)
    assert options
    assert main([*job, small, *options[0]]) == 0
    assert "fits: " in capsys.readouterr().out


def found(what: str, memory: int, seconds: float) -> Found:
    time = StepTime(best=seconds, worst=seconds, resources={}, tokens_per_second=(0, 0), mfu=(0, 0))
    return Found((Change(what, {what: memory}),), Tried(memory=memory, time=time))


def test_changes_are_combined_by_the_shares_they_leave() -> None:
    base = found("base", 100, 10.0)
    half, most, slow = found("a", 50, 11.0), found("a", 80, 10.0), found("b", 60, 20.0)
    pairs = list(_combine(base, [half, most, slow], budget=35))
    assert pairs == [((2, 1.1 * 2.0), (*half.changes, *slow.changes))]  # 0.5 x 0.6; 0.8 x 0.6 not
    # nothing is expected to fit: the most sparing is tried all the same
    assert list(_combine(base, [half, most, slow], budget=10)) == [
        ((0, 0.0), (*half.changes, *slow.changes))
    ]
    assert list(_combine(base, [half], budget=10)) == []


def test_changes_leave_the_step_as_it_is(tmp_path: Path) -> None:
    """Each is heavier than what the job has, and what it has is not proposed."""
    job = planned(
        tmp_path,
        *("--activation_checkpoint.mode=selective", "--training.enable_cpu_offload"),
        *("--training.loss_chunks=4", "--parallelism.data_parallel_replicate_degree=2"),
        "--parallelism.fsdp_reshard_after_forward=never",
        world=4,
    )
    said = [str(change) for change in propose(job)]
    shard = "--parallelism.data_parallel_shard_degree=-1"
    assert said[:2] == [
        "--activation_checkpoint.mode=selective --activation_checkpoint.selective_ac_option=op",
        "--activation_checkpoint.mode=full",
    ]
    assert f"--parallelism.data_parallel_replicate_degree=1 {shard}" in said
    assert "--training.loss_chunks=16" in said
    assert "--parallelism.fsdp_reshard_after_forward=always" in said
    assert not [one for one in said if "offload" in one or "pipeline" in one or "mode=none" in one]
    assert [one for one in said if "tensor" in one] == [
        f"--parallelism.tensor_parallel_degree=2 {shard}"  # no more share a machine
    ]


RECOMPUTED = "--activation_checkpoint.mode="


def test_a_budget_is_replaced_by_all_that_recomputes(tmp_path: Path) -> None:
    """A rehearsal recomputes nothing with it, whatever the option says, which it does not read."""
    budget = ("--compile.enable", f"{RECOMPUTED}memory_budget")
    for option in ("op", "2"):
        job = planned(tmp_path, *budget, f"--activation_checkpoint.selective_ac_option={option}")
        said = [str(change) for change in propose(job) if change.what == "recomputation"]
        assert said == [
            f"{RECOMPUTED}selective --activation_checkpoint.selective_ac_option=2",
            f"{RECOMPUTED}selective --activation_checkpoint.selective_ac_option=op",
            f"{RECOMPUTED}full",
        ]


def test_experts_are_dealt_out(tmp_path: Path) -> None:
    """To more ranks than now, also where each has all of them; and that does lower the memory."""
    experts = ("--model.name=qwen3_moe", "--model.expert_hidden_dim=4096")
    shard, degree = "--parallelism.data_parallel_shard_degree=-1", "expert_parallel_degree"
    for now in (1, 2):
        job = planned(tmp_path, *experts, f"--parallelism.{degree}={now}", world=8)
        said = [str(change) for change in propose(job) if degree in change.what]
        assert said == [f"--parallelism.{degree}={n * now} {shard}" for n in (2, 4)]
    assert not [change for change in propose(planned(tmp_path)) if degree in change.what]
    needed = [
        replay(
            rehearse_rank(planned(tmp_path, *experts, f"--parallelism.{degree}={n}", world=4), 0),
            expandable=True,
        ).needed
        for n in (1, 2)
    ]
    assert needed[1] < needed[0]


def test_a_run_asks_for_a_plan_of_itself() -> None:
    command = planning_command(
        ["--job.config_file", "a.toml"],
        world_size=16,
        gpus_per_node=8,
        device="NVIDIA H100 80GB HBM3",
        memory=round(79.1 * GIB),
        expandable=False,
    )
    assert command[1:] == [
        *("torchtitan.plan", "memory", "--ran_out", "--world_size=16", "--gpus_per_node=8"),
        *("--device=H100", "--memory_gib=79.1", "--classic_allocator"),
        *("--job.config_file", "a.toml"),
    ]
    assert DEVICES["H100"].memory == round(79.1 * GIB)


def test_the_cause_of_an_error_is_found() -> None:
    """A pipeline raises its own error from that of a stage."""
    cause = torch.OutOfMemoryError("full")
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = cause
    assert find_cause(cause) is find_cause(wrapped) is cause
    assert find_cause(RuntimeError("other")) is None


@pytest.mark.usefixtures("warm_starts")
def test_a_run_out_of_memory_is_explained_and_mended(tmp_path: Path) -> None:
    """Two ranks of a pipeline on devices with too little memory, pretended."""
    pipeline = [PP2, "--parallelism.pipeline_parallel_microbatch_size=4", "--training.steps=2"]
    small = "--training.callbacks=tests.plan.small_device:Small"
    job = [*write_job(tmp_path), *pipeline, small, "--training.local_batch_size=8"]
    job += ["--activation_checkpoint.mode=none", "--checkpoint.enable=false"]
    job += ["--model.dim=256", "--model.hidden_dim=1024", "--model.num_layers=8"]

    def run(*more: str, limit: float = float("inf")) -> list[tuple[int, str]]:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "torchtitan.train", *job, *more],
                env={
                    **{**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
                    **{**place, "SMALL_DEVICE": str(limit)},
                },
                stderr=subprocess.PIPE,
                text=True,
            )
            for place in places_of_ranks(2)
        ]
        said = [rank.communicate(timeout=150)[1] for rank in ranks]
        return [(rank.returncode, text) for rank, text in zip(ranks, said, strict=True)]

    enough = run()
    assert [code for code, _ in enough] == [0, 0], enough
    peak = max(int(found) for _, text in enough for found in re.findall(r"peak (\d+)", text))
    ended = run(limit=0.97 * peak)
    full = [text for code, text in ended if code == 2]
    assert full, ended
    explained = "".join(full)
    assert explained.count("has run out of its device's memory: ") == 1
    assert "live at the peak" in explained
    options = suggested(explained)
    assert options, explained
    mended = run(*options[0], limit=0.97 * peak)
    assert [code for code, _ in mended] == [0, 0], mended
