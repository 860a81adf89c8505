"""One model in every layout: equal initial weights, losses, gradient norms and final weights.

float32, tiny model with a vocabulary that no degree divides, a random number of valid labels a
sample, and the same global batch of 8 samples cut in different ways. Rounding is all that may
differ over 20 steps: what `scripts/compare_layouts.py` allows, whose comparison this is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed.fsdp import FSDPModule

from scripts.layouts.gaps import (
    WEIGHTS_TOLERANCE,
    compare_rows,
    compare_weights,
    first_unequal,
)
from scripts.layouts.words import parse_layout
from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.models.decoder import HeadLoss
from torchtitan.models.families import MODELS
from torchtitan.optim.loss import count_valid
from torchtitan.parallel import apply

LAYOUTS = {
    "fsdp 2": "fsdp2",
    "fsdp 2, loss in chunks": "fsdp2 --training.loss_chunks=3",
    "fsdp 4, one microbatch": "fsdp4",
    "ddp 2": "ddp2",
    "hsdp 2x2": "hsdp2x2",
    "fsdp 2, weights kept for backward": "fsdp2 --parallelism.fsdp_reshard_after_forward=never",
    "fsdp 2, recomputed": "fsdp2 --activation_checkpoint.mode=full",
    "fsdp 2, offloaded": "fsdp2 --training.enable_cpu_offload",
    "fsdp 3 of 12 samples": "fsdp3 --training.global_batch_size=12",
    "hsdp 2x2, accumulating": "hsdp2x2 --training.local_batch_size=1",
    "one device, one microbatch": "single --training.local_batch_size=8",
}


@pytest.fixture(scope="module")
def on_one_device(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> dict[int, jobs.Result]:
    """The reference by global batch size."""
    folder = tmp_path_factory.mktemp("one")
    results = {}
    for size in (8, 12):
        job = jobs.write_job(folder, name=f"batch{size}", cache=cache)
        [results[size]] = ranks.run(
            jobs.train, [*job, f"--training.global_batch_size={size}"], world=1
        )
    return results


def assert_same_training(result: jobs.Result, reference: jobs.Result) -> None:
    found = compare_rows(reference.rows, result.rows)
    assert not found.is_found, str(found)
    weights = compare_weights(reference.initial, reference.final, result.final)
    assert weights.largest <= WEIGHTS_TOLERANCE, weights


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: dict[int, jobs.Result]
) -> None:
    parsed = parse_layout(LAYOUTS[layout])
    reference = on_one_device[12 if parsed.world_size == 3 else 8]
    job = [*jobs.write_job(tmp_path, cache=cache), *parsed.arguments]
    result = ranks.run(jobs.train, job, world=parsed.world_size)[0]
    assert first_unequal(reference.initial, result.initial) == ""
    assert_same_training(result, reference)


def train_with_averaged_gradients(job: list[str]) -> jobs.Result:
    """Plant the bug that clipping hides elsewhere: a mean over ranks in the place of the sum."""
    correct = apply.apply_fsdp

    def averaging(model: FSDPModule, **arguments: object) -> None:
        correct(model, **arguments)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    apply.apply_fsdp = averaging
    try:
        return jobs.train(job)
    finally:
        apply.apply_fsdp = correct


def train_on_a_mean_of_means(job: list[str]) -> jobs.Result:
    """Plant another: each microbatch's mean weighs the same, however few its valid tokens."""

    def mean(correct: HeadLoss) -> HeadLoss:
        return lambda x, weight, labels: (
            correct(x, weight, labels) / count_valid(labels).clamp(min=1) * labels.numel() / 2
        )

    with jobs.other_loss(mean):
        return jobs.train(job)


@pytest.mark.parametrize("bug", [train_with_averaged_gradients, train_on_a_mean_of_means])
@pytest.mark.parametrize("layout", ["fsdp 2", "ddp 2"])
def test_a_planted_bug_is_seen(
    bug: Callable[[list[str]], jobs.Result],
    layout: str,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: dict[int, jobs.Result],
) -> None:
    parsed = parse_layout(LAYOUTS[layout])
    job = [*jobs.write_job(tmp_path, cache=cache), *parsed.arguments, "--training.steps=3"]
    result = ranks.run(bug, job, world=parsed.world_size)[0]
    found = compare_rows(on_one_device[8].rows[:3], result.rows, tolerances={"grad_norm": 1e-2})
    assert [step for step, _ in found.gaps["grad_norm"].beyond] == [1, 2, 3]
    assert found.unmatched_steps == ()


def test_where_weights_are_kept_for_backward_changes_no_bit(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    finals = {}
    for kept in ("default", "always", "never", "2"):
        job = jobs.write_job(tmp_path, name=kept, cache=cache)
        job += [f"--parallelism.fsdp_reshard_after_forward={kept}", "--training.steps=3"]
        finals[kept] = ranks.run(jobs.train, job, world=4)[0]
    for kept, result in finals.items():
        assert result.rows[-1]["loss"] == finals["default"].rows[-1]["loss"]
        assert first_unequal(finals["default"].final, result.final) == "", kept


def test_bfloat16_trains_alike_on_one_device_and_on_two(
    ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: dict[int, jobs.Result]
) -> None:
    """Within the rounding of bfloat16, 2^-8, of float32, and much closer to each other."""
    precision = "--training.mixed_precision_param=bfloat16"
    losses = {}
    for world in (1, 2):
        job = [*jobs.write_job(tmp_path, name=f"bf16-{world}", cache=cache), precision]
        result = ranks.run(jobs.train, job, world=world)[0]
        losses[world] = [row["loss"] for row in result.rows]
    assert losses[1] == pytest.approx(losses[2], rel=1e-3)
    exact = [row["loss"] for row in on_one_device[8].rows]
    assert losses[1] == pytest.approx(exact, rel=2**-8)
    assert losses[1] != pytest.approx(exact, rel=1e-6)


def train_tied(job: list[str]) -> jobs.Result:
    """Train the tiny model with its embedding as output head, as in Llama 3.2."""
    flavors = MODELS["llama3"].flavors
    untied = flavors["tiny"]
    flavors["tiny"] = replace(untied, tie_embeddings=True)
    try:
        return jobs.train(job)
    finally:
        flavors["tiny"] = untied


@pytest.mark.parametrize("layout", ["fsdp 2, loss in chunks", "hsdp 2x2", "fsdp 2, offloaded"])
def test_tied_embeddings_get_both_gradients_in_every_layout(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    parsed = parse_layout(LAYOUTS[layout])
    [reference] = ranks.run(train_tied, jobs.write_job(tmp_path, name="one", cache=cache), world=1)
    job = [*jobs.write_job(tmp_path, cache=cache), *parsed.arguments]
    result = ranks.run(train_tied, job, world=parsed.world_size)[0]
    assert "output.weight" not in result.final
    assert_same_training(result, reference)


@pytest.mark.parametrize("optimizer", ["SGD", "Adam"])
def test_other_optimizers_take_sharded_parameters(
    optimizer: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    choice = [f"--optimizer.name={optimizer}", "--optimizer.lr=0.01", "--training.steps=5"]
    rows = []
    for world in (1, 2):
        job = jobs.write_job(tmp_path, name=f"on{world}", cache=cache)
        rows.append(ranks.run(jobs.train, [*job, *choice], world=world)[0].rows)
    found = compare_rows(*rows)
    assert not found.is_found, str(found)
