"""Exactness: a run that was stopped and resumed equals one that was not, bit for bit."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.pipeline_jobs import strong_weights
from tests.distributed.rank_pool import RankPool
from tests.jobs import BALANCED, DDP, EXPERTS, OPTIONS, OWN_THINGS, TP2, cp, ep, pipeline
from torchtitan.models.interface import HeadLoss

pytestmark = pytest.mark.slow

EXACT = ("step", "loss", "max_loss", "grad_norm", "lr", "num_tokens", "valid_token_fraction")


def exact(rows: list[dict[str, float]]) -> list[list[float]]:
    return [[row[key] for key in EXACT] for row in rows]


MOE = (EXPERTS, "--model.flavor=tiny8", "--model.num_layers=3", "--training.seq_len=40")
WORKERS, ASYNC = "--training.dataloader.num_workers=2", "--checkpoint.async_mode=async"
WHOLE = "--training.local_batch_size=8"
# ranks, options
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "one process": (1, ()),
    "one process, async, workers": (1, (WORKERS, ASYNC)),
    "fsdp 2, bfloat16, async": (2, ("--training.mixed_precision_param=bfloat16", ASYNC)),
    "ddp 2, SGD": (2, (*DDP, "--optimizer.name=SGD", "--optimizer.momentum=0.9")),
    "one process, SGD without state": (1, ("--optimizer.name=SGD",)),
}
QUIET: dict[str, tuple[int, tuple[str, ...]]] = {
    "cp 2 ring, own things": (2, (*OWN_THINGS, *cp(2, "ring"), WHOLE)),
    "one process, compiled": (
        1,
        ("--debug.deterministic=true", *OPTIONS["half recomputed"], *OPTIONS["compiled"], WHOLE),
    ),
    "ep 2, balanced, Muon, recomputed, async": (
        2,
        (*MOE, *BALANCED, ep(2), "--optimizer.name=Muon", *OPTIONS["recomputed"], ASYNC),
    ),
    "pp 2, balanced": (2, (*MOE, *BALANCED, *pipeline("1F1B"), "--training.local_batch_size=4")),
    "tp 2, own family": (2, ("--model.name=examples.parallel_block:SPEC", TP2, WHOLE)),
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


@pytest.mark.promise("exact-resume", "same-bits")
@pytest.mark.slow(gate=["one process"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_four_steps_equal_two_and_two(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    """Rows and the hash of the state (weights, optimizer, generators, data) on every rank; neither
    workers nor saving in the background may change a bit either."""
    world, how = LAYOUTS[layout]
    plain = [option for option in how if option not in (WORKERS, ASYNC)]
    whole, parts = (jobs.write_job(tmp_path, name=name, cache=cache) for name in ("whole", "parts"))
    stops = (1, 2, 4) if world == 1 else (2, 4)
    runs = [([*whole, *plain], (4,)), ([*parts, *how], stops)]
    for [through], [*_, resumed] in ranks.run(train_noisily, runs, world=world, timeout=280):
        assert resumed == through


def train_to(jobs_of: list[tuple[list[str], int]]) -> list[tuple[list[Any], str]]:
    """Train each job to its step; return its figures, those of routers too, and the state."""
    found = []
    for job, step in jobs_of:
        with strong_weights():
            result = jobs.train([*job, f"--training.steps={step}"])
        routers = [{k: row[k] for k in row if k.startswith("router/")} for row in result.rows]
        found.append(([*exact(result.rows), *routers], result.state_hash))
    return found


@pytest.mark.promise("exact-resume", "balance")
@pytest.mark.parametrize("layout", QUIET)
def test_three_steps_equal_one_and_two(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    world, how = QUIET[layout]
    whole, parts = (
        [*jobs.write_job(tmp_path, name=name, cache=cache), *how] for name in ("whole", "parts")
    )
    starts = [(whole, 3), (parts, 1), (parts, 3)]
    for through, _, resumed in ranks.run(train_to, starts, world=world, timeout=280):
        assert resumed == through


@pytest.mark.promise("exact-resume")
def test_a_run_that_died_between_checkpoints_repeats_what_was_lost(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Rows of the steps after the checkpoint are trained, and written, again."""
    job = [*jobs.write_job(tmp_path), "--checkpoint.interval=2", "--training.steps=5"]
    [through] = ranks.run(jobs.train, job, world=1)
    for step in (4, 5):
        shutil.rmtree(tmp_path / "run" / "checkpoint" / f"step-{step}")
    [resumed] = ranks.run(jobs.train, job, world=1)
    assert exact(resumed.rows) == exact(through.rows)
    assert resumed.state_hash == through.state_hash
