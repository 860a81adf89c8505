"""Steps that spike: the bound, what becomes of them, and that all layouts and restarts agree."""

from __future__ import annotations

import random
import statistics
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from tests.optim.spiky import SPIKES
from torchtitan.checkpoint.state import model_tensors, optimizer_tensors
from torchtitan.metrics.events import read_events
from torchtitan.metrics.rows import read_rows
from torchtitan.models.init import local_part
from torchtitan.optim.settings import SpikesConfig
from torchtitan.optim.spikes import SpikeDetector, robust_bounds
from torchtitan.tools.compare import command as compare
from torchtitan.trainer import Run

JOB = [
    "--model.flavor=tiny",
    "--model.tokenizer_path=byte",
    "--training.seq_len=32",
    "--training.local_batch_size=2",
    "--training.global_batch_size=8",
    "--lr_scheduler.warmup_steps=2",
    "--training.dataset=tests.optim.spiky:Spiky",
    "--training.mixed_precision_param=float32",
    "--model.vocab_size=264",
    "--activation_checkpoint.mode=none",
    "--training.steps=18",
    "--optimizer.lr=0.02",
    "--lr_scheduler.total_steps=18",
    "--metrics.log_freq=1",
    "--spikes.action=skip",
    "--spikes.window=4",
    "--spikes.deviations=3",
    "--checkpoint.enable",
]
CPU = torch.device("cpu")


@pytest.mark.promise("spikes")
def test_bounds_are_those_of_medians() -> None:
    draw = random.Random(1)
    for _ in range(50):
        values = [draw.gauss(3, draw.choice([0.001, 1, 10])) for _ in range(draw.randrange(4, 30))]
        middle = statistics.median_high(values)
        mad = statistics.median_high(abs(value - middle) for value in values)
        bound = middle + 5 * max(1.4826 * mad, abs(middle) / 100)
        last_FW = torch.tensor([values, values[::-1]], dtype=torch.float64)
        for found in zip(*robust_bounds(last_FW, deviations=5), strict=True):
            assert [one.item() for one in found] == pytest.approx([middle, bound], rel=1e-12)


@pytest.fixture
def spikes(monkeypatch: pytest.MonkeyPatch) -> SpikeDetector:
    monkeypatch.setattr(dist, "all_reduce", lambda tensor: None)
    settings = SpikesConfig(action="clip", window=6, deviations=4.0)
    return SpikeDetector(settings, equal_ranks=1, device=CPU)


def judge(spikes: SpikeDetector, norm: float, *, loss: float = 2.0) -> tuple[float, float]:
    norm_to_take, clip_at = spikes.check(
        1,
        loss_sum=torch.tensor(loss * 64),
        divisor=torch.tensor(64),
        norm=torch.tensor(norm),
        max_norm=3.0,
    )
    return float(norm_to_take), float(clip_at)


@pytest.mark.promise("spikes")
def test_a_spike_is_clipped_to_the_median_and_a_level_that_lasts_is_none(
    spikes: SpikeDetector,
) -> None:
    first = [judge(spikes, norm) for norm in (9.0, 1.0, 1.25, 1.5, 1.0, 1.25)]
    assert {clip_at for _, clip_at in first} == {3.0}  # the window was not full
    assert judge(spikes, 20.0) == (20.0, 1.25)
    assert judge(spikes, 1.25, loss=9.0) == (1.25, 1.25)
    assert judge(spikes, 1.25) == (1.25, 3.0)
    lasting = [judge(spikes, 20.0)[1] for _ in range(6)]
    assert lasting[0] < 3.0
    assert lasting[3:] == [3.0] * 3
    assert spikes.figures()["spikes"] == 2 + sum(clip_at < 3.0 for clip_at in lasting)


def hash_parts(run: Run) -> tuple[str, str]:
    """Hash this rank's weights and its optimizer state, bit for bit."""
    parts = model_tensors(run.model), optimizer_tensors(run.model, run.optimizer)
    weights, state = (
        jobs.hash_tensors({name: local_part(t).detach() for name, t in part.items()})
        for part in parts
    )
    return weights, state


def check_steps(hashes: list[list[tuple[str, str]]], run: Path) -> None:
    """Check which steps were left out on every rank, and what was recorded of them."""
    told = [(row["step"], row["figure"]) for row in read_events(run) if row["event"] == "spike"]
    assert told == [(10, "loss"), (15, "loss"), (15, "grad_norm")]
    assert [row["spikes"] for row in read_rows(run / "metrics.jsonl")][-5:] == [1, 2, 2, 2, 2]
    for of_rank in hashes:
        assert len(of_rank) == 18
        for step, (one, next_one) in enumerate(pairwise(of_rank), start=2):
            pairs = zip(one, next_one, strict=True)
            assert {before != now for before, now in pairs} == {step not in SPIKES}, step


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one device."""
    run = tmp_path_factory.mktemp("alone")
    hashes = ranks.run(
        jobs.after_each_step, [*JOB, f"--job.dump_folder={run}"], hash_parts, world=1
    )
    check_steps(hashes, run)
    return run


@pytest.mark.promise("spikes")
@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        ["--optimizer.implementation=foreach"],
        ["--parallelism.tensor_parallel_degree=2"],
        [
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=1F1B",
        ],
    ],
    ids=["fsdp 2, foreach", "tp 2", "pp 2"],
)
def test_a_step_that_is_left_out_changes_nothing(
    layout: list[str], alone: Path, ranks: RankPool, tmp_path: Path
) -> None:
    job = [*JOB, *layout, f"--job.dump_folder={tmp_path}", UNSAVED]
    check_steps(ranks.run(jobs.after_each_step, job, hash_parts, world=2), tmp_path)
    rows, expected = (list(read_rows(run / "metrics.jsonl")) for run in (tmp_path, alone))
    for figure in ("loss", "grad_norm"):
        # to rounding, which the steps after the spikes make larger: the loss is at 1/500 by then
        found = [row[figure] for row in rows]
        assert found == pytest.approx([row[figure] for row in expected], rel=1e-3)


@pytest.mark.promise("exact-resume", "spikes")
@pytest.mark.slow
def test_a_resumed_run_goes_by_the_same_figures(
    alone: Path, ranks: RankPool, tmp_path: Path
) -> None:
    stopped = [*JOB, f"--job.dump_folder={tmp_path}"]
    # three steps before the spike: the window holds what was seen before the stop
    ranks.run(jobs.train, [*stopped, "--training.steps=12"], world=1)
    ranks.run(jobs.train, stopped, world=1)
    assert compare.main(["runs", str(alone), str(tmp_path)]) == 0
    assert list(read_rows(tmp_path / "metrics.jsonl"))[-1]["spikes"] == 2
