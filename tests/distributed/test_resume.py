"""Exactness: twice the same run, and a run that was stopped and resumed, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.pipeline_jobs import pipeline, strong_weights
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_matrix import BALANCED, EXPERTS, HOW, OWN_THINGS, TP2, cp, ep
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


TINY8 = "--model.flavor=tiny8"
MOE = (EXPERTS, TINY8, "--model.num_layers=3", "--training.seq_len=40")
WORKERS, ASYNC = "--training.dataloader.num_workers=2", "--checkpoint.async_mode=async"
WAYS = {
    "sync": (),
    "async": (ASYNC,),
    "sync, workers": (WORKERS,),
    "async, workers": (WORKERS, ASYNC),
}
# ranks, options, ways to save and read
LAYOUTS: dict[str, tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    "one process": (1, (), tuple(WAYS)),
    "fsdp 2": (2, jobs.FSDP, ("sync", "async, workers")),
    "ddp 2": (2, jobs.DDP, ("sync",)),
    "hsdp 2x2": (4, jobs.HSDP, ("async",)),
    "fsdp 2, bfloat16": (2, ("--training.mixed_precision_param=bfloat16",), ("sync",)),
    "one process, SGD": (1, ("--optimizer.name=SGD", "--optimizer.momentum=0.9"), ("sync",)),
    "fsdp 2, SGD without state": (2, ("--optimizer.name=SGD",), ("sync",)),
    "fsdp 2, Muon": (2, ("--optimizer.name=Muon",), ("sync",)),
}
QUIET: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp 2": (2, (TP2, TINY8)),
    "cp 2 ring": (2, (*cp(2, "ring"), "--training.seq_len=40")),
    "one process, compiled": (
        1,
        ("--debug.deterministic=true", *HOW["half recomputed"], *HOW["compiled"]),
    ),
    "fsdp 2, experts, Muon": (2, (*MOE, "--optimizer.name=Muon")),
    "ep 2, recomputed": (2, (*MOE, ep(2), *HOW["recomputed"])),
    "fsdp 2, balanced, async": (2, (*MOE, *BALANCED, ASYNC)),
    "hsdp 2x2, ep 2, balanced": (4, (*MOE, *BALANCED, *jobs.HSDP, ep(2))),
    "pp 2, balanced": (2, (*MOE, *BALANCED, *pipeline("1F1B"), "--training.local_batch_size=4")),
    "tp 2, own family": (2, ("--model.name=examples.parallel_block:SPEC", TP2)),
    "fsdp 2, own things": (2, OWN_THINGS),
}
"""Where the loss cannot draw, because ranks share it or it is compiled."""


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
    world, overrides, ways = LAYOUTS[layout]
    runs = [([*jobs.write_job(tmp_path, name="whole"), *overrides], (8,))]
    for way in ways:
        parts = [*jobs.write_job(tmp_path, name=way), *overrides, *WAYS[way]]
        runs.append((parts, (3, 5, 8)))
    results = ranks.run(train_noisily, runs, world=world, timeout=280)
    through, *resumed = zip(*results, strict=True)  # of all ranks
    for way, found in zip(ways, resumed, strict=True):
        assert found[0][-1].rows == through[0][0].rows, way
        assert [r[-1].state_hash for r in found] == [r[0].state_hash for r in through], way


def train_to(jobs_of: list[tuple[list[str], int]]) -> list[tuple[list[Any], str]]:
    """Train each job to its step; return its figures, those of routers too, and the state."""
    found = []
    for job, step in jobs_of:
        with strong_weights():
            result = jobs.train([*job, f"--training.steps={step}"])
        routers = [{k: row[k] for k in row if k.startswith("router/")} for row in result.rows]
        found.append(([*exact(result.rows), *routers], result.state_hash))
    return found


@pytest.mark.parametrize("layout", QUIET)
def test_four_steps_equal_two_and_two(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    world, how = QUIET[layout]
    whole, parts = (
        [*jobs.write_job(tmp_path, name=name, cache=cache), *how] for name in ("whole", "parts")
    )
    starts = [(whole, 4), (parts, 2), (parts, 4)]
    for through, _, resumed in ranks.run(train_to, starts, world=world, timeout=280):
        assert resumed == through


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
