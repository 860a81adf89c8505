"""Exactness: twice the same run, and a run that was stopped and resumed, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.checkpoint import restore
from torchtitan.models.interface import HeadLoss

EXACT = ("step", "loss", "max_loss", "grad_norm", "lr", "num_tokens", "valid_token_fraction")


def exact(rows: list[dict[str, float]]) -> list[list[float]]:
    return [[row[key] for key in EXACT] for row in rows]


def test_the_same_config_twice_gives_the_same_digits(ranks: RankPool, tmp_path: Path) -> None:
    results = [
        ranks.run(jobs.train, jobs.write_job(tmp_path, name=name), world=2)[0] for name in "ab"
    ]
    assert exact(results[0].rows) == exact(results[1].rows)
    assert results[0].state_hash == results[1].state_hash


LAYOUTS = {
    "one process": (1, ()),
    "fsdp 2": (2, jobs.FSDP),
    "ddp 2": (2, jobs.DDP),
    "hsdp 2x2": (4, jobs.HSDP),
    "fsdp 2, bfloat16": (2, ("--training.mixed_precision_param=bfloat16",)),
    "one process, SGD": (1, ("--optimizer.name=SGD", "--optimizer.momentum=0.9")),
    "fsdp 2, SGD without state": (2, ("--optimizer.name=SGD",)),
    "fsdp 2, Muon": (2, ("--optimizer.name=Muon",)),
}
WAYS = {
    "sync": (),
    "async": ("--checkpoint.async_mode=async",),
    "sync, workers": ("--training.dataloader.num_workers=2",),
    "async, workers": ("--training.dataloader.num_workers=2", "--checkpoint.async_mode=async"),
}
WAYS_OF = {
    "one process": tuple(WAYS),
    "fsdp 2": tuple(WAYS),
    "ddp 2": ("sync", "async, workers"),
    "hsdp 2x2": ("sync", "async, workers"),
}


@dataclass(frozen=True)
class Noisy:
    """A run whose loss draws from torch's generator in every step, as dropout does."""

    rows: list[list[float]]
    state_hash: str


def train_noisily(runs: list[tuple[list[str], tuple[int, ...]]]) -> list[list[Noisy]]:
    """Train each job to each of its stops, starting anew each time, as if other jobs had used the
    generator between."""

    def noisy(correct: HeadLoss) -> HeadLoss:
        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            assert (labels == -100).any(), "masked labels belong to this test"
            noise = 1 + 0.1 * torch.rand(x.shape[-1])
            return correct(x * noise.to(x.dtype), weight, labels)

        return loss

    def train(job: list[str], *, to: int) -> Noisy:
        torch.manual_seed(to)
        result = jobs.train([*job, f"--training.steps={to}"])
        return Noisy(exact(result.rows), result.state_hash)

    with jobs.other_loss(noisy):
        return [[train(job, to=stop) for stop in stops] for job, stops in runs]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_eight_steps_equal_three_and_two_and_three(
    layout: str, ranks: RankPool, tmp_path: Path
) -> None:
    """Rows and the hash of the state (weights, optimizer, generators, data) on every rank; neither
    workers nor saving in the background may change a bit either."""
    world, overrides = LAYOUTS[layout]
    ways = WAYS_OF.get(layout, ("sync",))
    runs = [([*jobs.write_job(tmp_path, name="whole"), *overrides], (8,))]
    for way in ways:
        parts = [*jobs.write_job(tmp_path, name=way), *overrides, *WAYS[way]]
        runs.append((parts, (3, 5, 8)))
    results = ranks.run(train_noisily, runs, world=world, timeout=280)
    through, *resumed = zip(*results, strict=True)  # of all ranks
    for way, found in zip(ways, resumed, strict=True):
        assert found[0][-1].rows == through[0][0].rows, way
        assert [r[-1].state_hash for r in found] == [r[0].state_hash for r in through], way


def test_a_run_that_died_between_checkpoints_repeats_what_was_lost(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Rows of the steps after the checkpoint are trained, and written, again."""
    through = ranks.run(jobs.train, jobs.write_job(tmp_path, name="whole"), world=1)
    job = [*jobs.write_job(tmp_path, name="died"), "--checkpoint.interval=6"]
    ranks.run(jobs.train, job, world=1)
    for step in (12, 18, 20):
        shutil.rmtree(tmp_path / "died" / "checkpoint" / f"step-{step}")
    resumed = ranks.run(jobs.train, job, world=1)
    assert exact(resumed[0].rows) == exact(through[0].rows)
    assert resumed[0].state_hash == through[0].state_hash


def test_another_number_of_ranks_goes_on_at_the_next_sample(
    ranks: RankPool, tmp_path: Path
) -> None:
    through = ranks.run(jobs.train, jobs.write_job(tmp_path, name="whole"), world=1)
    job = jobs.write_job(tmp_path, name="moved")
    ranks.run(jobs.train, [*job, "--training.steps=7"], world=2)
    ranks.run(jobs.train, [*job, *jobs.HSDP, "--training.steps=13"], world=4)
    resumed = ranks.run(jobs.train, job, world=1)
    for ours, theirs in zip(resumed[0].rows, through[0].rows, strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        assert ours["valid_token_fraction"] == theirs["valid_token_fraction"]


def resume_with_another_generator(job: list[str]) -> tuple[dict[str, Tensor], list[str]]:
    """Resume as where there is a kind of generator that the checkpoint knows nothing of."""
    correct = restore.rng_tensors
    taken: list[dict[str, Tensor]] = []
    restore.rng_tensors = lambda *, rank: {
        **correct(rank=rank),
        f"rank_{rank}.cuda": torch.zeros(16, dtype=torch.uint8),
    }
    correct_set = restore.set_rng
    restore.set_rng = lambda states: (taken.append(dict(states)), correct_set(states))
    try:
        lines = jobs.logged(job)
    finally:
        restore.rng_tensors, restore.set_rng = correct, correct_set
    return taken[0], lines


def test_a_checkpoint_without_the_generators_of_a_gpu_is_resumed(
    ranks: RankPool, tmp_path: Path
) -> None:
    """It was saved on CPUs."""
    job = [*jobs.write_job(tmp_path), "--training.steps=2"]
    ranks.run(jobs.train, job, world=2)
    for rank, (taken, lines) in enumerate(ranks.run(resume_with_another_generator, job, world=2)):
        assert list(taken) == [f"rank_{rank}.cpu"]
        [said] = [line for line in lines if f"rank_{rank}.cuda" in line]
        assert "debug.seed" in said
