"""Balancing of experts: counts, checkpoints, skipped steps. Layouts are in test_matrix.py."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.jobs import BALANCED as ROUTERS
from tests.jobs import EXPERTS, MODELS, TINY8, UNSAVED, ep, pipeline
from torchtitan.base.errors import NonFiniteError
from torchtitan.models.interface import HeadLoss
from torchtitan.optim import balance as module
from torchtitan.trainer import Run, Trainer

pytestmark = pytest.mark.slow

SAVED = (EXPERTS, *ROUTERS, "--training.seq_len=40", "--training.steps=4")
BALANCED = (*SAVED, UNSAVED)
COUNTS = "router.last_counts"


def biases(result: pj.Trained) -> dict[str, Tensor]:
    return {name: p for name, p in result.final.items() if name.endswith("expert_bias")}


def router_figures(rows: list[dict[str, Any]], prefix: str = "router/") -> list[dict[str, Any]]:
    return [{key: row[key] for key in row if key.startswith(prefix)} for row in rows]


def trained(what: str, on_one_device: OneDevice) -> pj.Trained:
    """The reference of the rows of test_matrix.py."""
    options = MODELS[what].options(Path())
    result: pj.Trained = on_one_device(pj.train, *options, evaluating=True)
    return result


@pytest.mark.promise("balance")
def test_the_reference_is_balanced(on_one_device: OneDevice) -> None:
    """Biases and losses matter in the reference of test_matrix.py."""
    found = trained("balanced", on_one_device)
    assert set(biases(found)) == {f"layers.{n}.moe.expert_bias" for n in (1, 2)}
    assert all(bias.abs().max() > 0.02 for bias in biases(found).values())
    counts = router_figures(found.rows, "router/counts/")
    assert {sum(of_layer) for row in counts for of_layer in row.values()} == {8 * 40 * 2}
    assert found.rows[0]["router/global_loss"] != found.rows[1]["router/global_loss"]
    without = (f"--router.{one}_weight=0.0" for one in module.LOSSES[::2])
    plain = on_one_device(pj.train, *MODELS["balanced"].options(Path()), *without)
    name = "layers.1.moe.router.gate.weight"
    ours, theirs = found.gradients[name], plain.gradients[name]
    assert (ours - theirs).norm() > 0.1 * ours.norm()


@pytest.mark.promise("balance")
def test_what_only_fills_samples_up_is_not_counted(on_one_device: OneDevice) -> None:
    found = trained("balanced, padding", on_one_device)
    data: list[Tensor] = on_one_device(lengths, *MODELS["balanced, padding"].options(Path()))
    num_text = [int(of_step.sum()) for of_step in data]
    assert all(0 < number < 0.9 * 8 * 180 for number in num_text)
    counts = router_figures(found.rows, "router/counts/")
    assert [{sum(of_layer) for of_layer in row.values()} for row in counts] == [
        {2 * number} for number in num_text
    ]


def lengths(job: list[str]) -> list[Tensor]:
    run = jobs.start(job)
    found = [torch.cat([one["length"] for one in next(run.loader)]) for _ in range(4)]
    Trainer(run).close()
    return found


# --- resuming


def _biases(run: Run) -> dict[str, Tensor]:
    named = run.model.named_parameters()
    return {n: p.detach().clone() for n, p in named if n.endswith("expert_bias")}


def begin(job: list[str]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    run = jobs.start(job)
    Trainer(run).close()
    assert run.balance is not None
    return _biases(run), run.balance.state()


@pytest.mark.promise("balance")
def test_biases_and_counts_load_into_other_layouts(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *SAVED, "--training.steps=2"]
    saved, _ = ranks.run(pj.train, job, world=2)
    wanted = biases(saved)
    assert all(bias.any() for bias in wanted.values())
    layouts: list[tuple[int, tuple[str, ...]]] = [
        (2, pipeline("1F1B")),
        (2, (ep(2),)),
    ]
    for world, how in layouts:
        found = ranks.run(begin, [*job, *how], world=world)
        loaded = {name: bias for one, _ in found for name, bias in one.items()}
        assert loaded.keys() == wanted.keys()
        assert all(loaded[name].equal(bias) for name, bias in wanted.items())
        assert all(state[COUNTS].equal(saved.balance[COUNTS]) for _, state in found)


# --- what must not change the balance


@pytest.mark.promise("balance")
def test_biases_stay_float32(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *BALANCED]
    job += ["--training.dtype=bfloat16", "--training.mixed_precision_param=bfloat16"]
    found = ranks.run(pj.train, job, world=2)
    for result in found:
        for bias in biases(result).values():  # 0.01 is none in bfloat16
            assert bias.dtype == torch.float32
            moves = bias.double() / 0.01
            assert bias.any()
            assert (moves - moves.round()).abs().max() < 1e-5


def train_into_a_bad_step(job: list[str], bad: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Train until the loss of a step is not finite."""
    runs: list[Run] = []

    def broken(correct: HeadLoss) -> HeadLoss:
        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            return correct(x, weight, labels) * (math.nan if runs[0].progress.step == bad else 1.0)

        return loss

    with pj.strong_weights():
        with jobs.other_loss(broken):
            runs.append(jobs.start(job))
        trainer = Trainer(runs[0])
        with pytest.raises(NonFiniteError):
            trainer.train()
        trainer.close()
    assert runs[0].balance is not None
    return _biases(runs[0]), runs[0].balance.state()


@pytest.mark.promise("not-finite")
@pytest.mark.parametrize("implementation", ["fused", "foreach"])
def test_a_step_that_is_not_taken_moves_nothing(
    implementation: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    how = (*BALANCED, f"--optimizer.implementation={implementation}")
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *how]
    [two] = ranks.run(pj.train, [*job, "--training.steps=2"], world=1)
    [(kept, state)] = ranks.run(train_into_a_bad_step, job, 3, world=1)
    assert all(bias.equal(two.final[name]) for name, bias in kept.items())
    assert state[COUNTS].equal(two.balance[COUNTS])
