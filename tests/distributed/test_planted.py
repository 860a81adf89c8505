"""The mistakes that trainers make, planted one at a time: the tests' own comparisons find each.

A bug stands in the place of the correct code while a small job runs. `SEEN` says where it shows
first when that job is compared with one device, as every job of test_matrix.py is; the others are
compared as test_resume.py, test_reference.py, test_validation.py and test_layouts.py do it. Bugs
of one room alone are planted beside its tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import Replicate

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed import test_reference as by_torch
from tests.distributed import test_validation as by_sample
from tests.distributed.conftest import OneDevice
from tests.distributed.pipeline_jobs import TINY8, Trained, pipeline
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_resume import Noisy, train_noisily
from torchtitan import trainer, validate
from torchtitan.audit.layouts.gaps import compare_rows, first_unequal
from torchtitan.checkpoint import restore
from torchtitan.data.loader import Loader
from torchtitan.lora import tensor as adapter_tensor
from torchtitan.models import init
from torchtitan.models.decoder import HeadLoss
from torchtitan.optim import muon
from torchtitan.optim.loss import count_valid
from torchtitan.parallel import apply, tensor
from torchtitan.parallel.pipeline import layout as pipeline_layout
from torchtitan.parallel.pipeline.stages import Stages
from torchtitan.parallel.pipeline.tied import TiedEmbedding

TP2 = "--parallelism.tensor_parallel_degree=2"
CP2 = "--parallelism.context_parallel_degree=2"
MUON = ("--optimizer.name=Muon", "--optimizer.lr=0.02")
ADAPTER = ("--lora.rank=4", "--lora.alpha=8.0")
Plant = Callable[[], AbstractContextManager[None]]


@contextmanager
def replaced(owner: Any, name: str, planted: Any) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, planted)
        yield


# --- seen by comparing with one device


def the_divisor_is_that_of_each_microbatch() -> AbstractContextManager[None]:
    """A mean of means: each microbatch weighs the same, however few its valid tokens."""

    def mean(correct: HeadLoss) -> HeadLoss:
        return lambda x, weight, labels: (
            correct(x, weight, labels) / count_valid(labels).clamp(min=1) * labels.numel() / 2
        )

    return jobs.other_loss(mean)


def gradients_are_not_summed_over_cp() -> AbstractContextManager[None]:
    """What the second rank's tokens add is left out of the gradients, but not of the loss."""

    def own(correct: HeadLoss) -> HeadLoss:
        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            value = correct(x, weight, labels)
            return value if dist.get_rank() == 0 else value.detach() + 0 * value

        return loss

    return jobs.other_loss(own)


def gradients_are_averaged() -> AbstractContextManager[None]:
    """A mean over ranks in the place of the sum; clipping hides it elsewhere."""
    correct = apply.apply_fsdp

    def averaging(model: FSDPModule, **arguments: Any) -> None:
        correct(model, **arguments)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(2.0)

    return replaced(apply, "apply_fsdp", averaging)


def gradients_of_norms_are_not_summed_over_tp() -> AbstractContextManager[None]:
    """A norm takes its part of the stream for a copy."""
    correct = tensor._Norm
    return replaced(tensor, "_Norm", lambda stream: correct(Replicate()))


def copied_adapters_keep_their_own_ranks_gradient() -> AbstractContextManager[None]:
    correct = adapter_tensor._local

    def local(tensor: Any) -> Tensor:
        is_copied = tensor.ndim == 2 and tensor.placements[0].is_replicate()
        return tensor.to_local() if is_copied else correct(tensor)

    return replaced(adapter_tensor, "_local", local)


def stages_are_in_the_wrong_order() -> AbstractContextManager[None]:
    """The layers of the first stage run on the last, and the other way round."""
    correct = pipeline_layout.name_modules

    def swapped(counts: tuple[int, ...]) -> Stages:
        first, last = correct(counts)
        ours, theirs = ([n for n in stage if n.startswith("layers.")] for stage in (first, last))
        return (first[0], *theirs), (*ours, *last[len(theirs) :])

    return replaced(pipeline_layout, "name_modules", swapped)


def the_tied_copy_is_stale() -> AbstractContextManager[None]:
    return replaced(TiedEmbedding, "refresh_copy", lambda self: None)


def each_shard_is_orthogonalised_by_itself() -> AbstractContextManager[None]:
    """No rank sends anything: a shard is taken for the matrix."""

    def plan(shapes: Mapping[str, Any], boxes: list[dict[str, muon.Box]]) -> list[muon.Matrix]:
        return [
            muon.Matrix(name, None, box.sizes, {rank: whole}, rank, frozenset({rank}))
            for rank, held in enumerate(boxes)
            for name, box in held.items()
            for whole in [muon.Box((0,) * len(box.sizes), box.sizes)]
        ]

    return replaced(muon, "plan_work", plan)


def copies_of_a_matrix_are_not_updated() -> AbstractContextManager[None]:
    """The owner keeps the result for itself."""
    correct = muon.plan_work

    def plan(*args: Any) -> list[muon.Matrix]:
        return [replace(m, parts={m.owner: m.parts[m.owner]}) for m in correct(*args)]

    return replaced(muon, "plan_work", plan)


@dataclass(frozen=True)
class Seen:
    """The smallest job that shows a bug, and in which figure of which step."""

    world: int
    layout: tuple[str, ...]
    figure: str
    step: int = 1
    job: tuple[str, ...] = ()
    sizes: Mapping[str, Any] | None = None


SEEN: dict[Plant, list[Seen]] = {
    the_divisor_is_that_of_each_microbatch: [
        Seen(1, ("--training.local_batch_size=2",), "loss"),
    ],
    gradients_are_not_summed_over_cp: [Seen(2, (CP2,), "grad_norm")],
    gradients_are_averaged: [Seen(2, (), "grad_norm"), Seen(2, jobs.DDP, "grad_norm")],
    gradients_of_norms_are_not_summed_over_tp: [Seen(2, (TP2,), "grad_norm")],
    copied_adapters_keep_their_own_ranks_gradient: [Seen(2, (TP2,), "grad_norm", job=ADAPTER)],
    stages_are_in_the_wrong_order: [Seen(2, pipeline("1F1B"), "loss")],
    each_shard_is_orthogonalised_by_itself: [
        Seen(2, (), "loss", step=2, job=MUON),
        Seen(2, (TP2,), "loss", step=2, job=MUON),
    ],
    copies_of_a_matrix_are_not_updated: [
        Seen(2, jobs.DDP, "loss", step=2, job=MUON),
    ],
    the_tied_copy_is_stale: [
        Seen(2, pipeline("ZBVZeroBubble"), "loss", step=2, sizes={"tie_embeddings": True})
    ],
}


def train(job: list[str], *, sizes: Mapping[str, Any], plant: Plant) -> Trained:
    with plant():
        return pj.train(job, sizes=sizes)


@pytest.mark.parametrize(
    ("plant", "seen"),
    [(plant, each) for plant, found in SEEN.items() for each in found],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_in_a_layout_is_seen(
    plant: Plant, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    sizes = {"num_layers": 2 if seen.sizes is None else 4, **(seen.sizes or {})}
    two_steps = [*seen.job, "--training.steps=2"]
    reference = on_one_device(pj.train, *two_steps, sizes=sizes)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *two_steps, *seen.layout, jobs.UNSAVED]
    result = ranks.run(train, job, sizes=sizes, plant=plant, world=seen.world)[0]
    first = compare_rows(reference.rows, result.rows).first
    assert first is not None
    assert (first.figure, first.beyond[0][0]) == (seen.figure, seen.step)


# --- seen by resuming


def a_resumed_run_skips_a_sample() -> AbstractContextManager[None]:
    correct = Loader.load_state_dict

    def load(self: Loader, state: dict[str, Any]) -> None:
        correct(self, {**state, "position": state["position"] + 1})

    return replaced(Loader, "load_state_dict", load)


def random_generators_are_not_restored() -> AbstractContextManager[None]:
    return replaced(restore, "set_rng", lambda states: None)


def stop_and_resume(job: list[str], *, plant: Plant) -> list[Noisy]:
    [before] = train_noisily([(job, (2,))])
    with plant():
        [after] = train_noisily([(job, (4,))])
    return before + after


@pytest.mark.parametrize(
    "plant", [a_resumed_run_skips_a_sample, random_generators_are_not_restored]
)
def test_a_bug_in_resuming_is_seen(
    plant: Plant, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    through, parts = (jobs.write_job(tmp_path, name=name, cache=cache) for name in ("a", "b"))
    [[[whole]]] = ranks.run(train_noisily, [(through, (4,))], world=1)
    [[before, after]] = ranks.run(stop_and_resume, parts, plant=plant, world=1)
    assert before.rows == whole.rows[:2]
    assert after.rows[2] != whole.rows[2]
    assert after.state_hash != whole.state_hash


# --- seen by plain PyTorch


def the_learning_rate_is_a_step_late() -> AbstractContextManager[None]:
    correct, held = trainer.set_lr, [0.0]

    def late(optimizer: torch.optim.Optimizer, lr: float) -> None:
        correct(optimizer, held[-1])
        held.append(lr)

    return replaced(trainer, "set_lr", late)


def train_late(job: list[str]) -> jobs.Result:
    with the_learning_rate_is_a_step_late():
        return jobs.train(job)


def test_a_late_learning_rate_is_seen(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    """The first step, of which the update comes late, is right; the log shows the right rate."""
    job = [*jobs.write_job(tmp_path, cache=cache), "--training.steps=2"]
    [result] = ranks.run(train_late, job, world=1)
    [(losses, _)] = ranks.run(by_torch.reference, job, world=1)
    first, second = (row["loss"] for row in result.rows)
    assert first == pytest.approx(losses[0], rel=1e-5)
    assert second != pytest.approx(losses[1], rel=1e-5)


def masked_labels_count_in_the_validation() -> AbstractContextManager[None]:
    return replaced(validate, "count_valid", lambda labels: torch.tensor(labels.numel()))


def train_counting_all(job: list[str]) -> jobs.Result:
    with masked_labels_count_in_the_validation():
        return by_sample.train(job)


def test_a_validation_that_ignores_the_mask_is_seen(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*by_sample.validated(tmp_path, cache=cache), "--training.steps=1"]
    [result] = ranks.run(train_counting_all, job, world=1)
    alone = [*job, "--checkpoint.enable=false", "--checkpoint.folder=none"]
    [expected] = ranks.run(by_sample.by_hand, alone, result.final, world=1)
    assert result.rows[0]["validation_loss"] != pytest.approx(expected, rel=1e-2)


# --- seen by the initial weights


def uneven_shards_begin_where_even_ones_would() -> AbstractContextManager[None]:
    correct = init._shard

    def shard(index: Tensor, placement: Any, degree: int, rank: int) -> Tensor:
        size = len(correct(index, placement, degree, rank))
        return index[rank * size : (rank + 1) * size]

    return replaced(init, "_shard", shard)


def train_uneven(job: list[str]) -> jobs.Result:
    with uneven_shards_begin_where_even_ones_would():
        return jobs.train(job)


def test_other_initial_weights_of_an_uneven_shard_are_seen(
    ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    """263 rows on two ranks."""
    one_step = "--training.steps=1"
    reference = on_one_device(jobs.train, one_step, toml=jobs.TINY)
    job = [*jobs.write_job(tmp_path, cache=cache), one_step]
    result = ranks.run(train_uneven, job, world=2)[0]
    assert first_unequal(reference.initial, result.initial).startswith("output.weight: ")
