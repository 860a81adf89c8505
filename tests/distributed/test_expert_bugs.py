"""The mistakes that trainers made with experts, planted one at a time: the comparison finds each.

A bug stands in the place of the correct code while a small job runs, dense layer and experts, and
is compared with one device by the first gradient of every parameter, before an optimizer sees it:
most of these leave the first loss as it is. `SEEN` says which parameters differ, and by how much.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import CheckpointError

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankError, RankPool
from tests.distributed.test_experts import MOE, ep, strong_experts
from tests.distributed.test_intentions import begin
from tests.distributed.test_matrix import HOW, TP2, cp
from tests.distributed.test_planted import replaced
from torchtitan import trainer
from torchtitan.audit.layouts.gaps import GRADIENTS_TOLERANCE, compare_gradients
from torchtitan.checkpoint import state
from torchtitan.hf.names import Names
from torchtitan.models import qwen3_moe
from torchtitan.models.moe import MoE
from torchtitan.models.routing import StackedExperts
from torchtitan.optim.loss import count_valid
from torchtitan.parallel import activation, apply, expert, tensor

Plant = Callable[[], AbstractContextManager[Any]]
SIZES = {"num_layers": 2}
ONE_STEP = ("--training.steps=1", "--training.seq_len=16")


class _Scaled(torch.autograd.Function):
    """A tensor as it is, whose gradient is a multiple."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def gradients_of_experts_are_multiplied_by_ep() -> AbstractContextManager[None]:
    """Each of the ranks that send tokens to an expert is counted as a copy of it."""
    correct = expert.Exchange.__call__

    def call(self: Any, compute: Any, x: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Any:
        def scaled(x: Tensor, counts: Tensor, here: Sequence[Tensor]) -> Any:
            return compute(x, counts, [_Scaled.apply(w, self._size) for w in here])

        return correct(self, scaled, x, counts, weights)

    return replaced(expert.Exchange, "__call__", call)


def the_gate_is_not_summed_over_tp() -> AbstractContextManager[None]:
    """Its weights are copies, and each rank's gradient is that of its own tokens alone."""

    def own(x: Tensor, weight: DTensor, *, product: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return product(x, weight.to_local())

    return replaced(tensor, "_local_product", own)


def results_are_combined_by_another_index() -> AbstractContextManager[None]:
    """Flat tokens are taken for sequence first, which is right for one sample at a time."""
    correct = MoE.route

    def route(self: MoE, x_BSC: Tensor) -> Tensor:
        out_BSC = correct(self, x_BSC)
        return out_BSC.transpose(0, 1).reshape(out_BSC.shape)

    return replaced(MoE, "route", route)


def tokens_are_counted_on_each_tp_rank() -> AbstractContextManager[None]:
    return replaced(trainer, "count_valid", lambda labels: 2 * count_valid(labels))


def gradients_of_experts_are_averaged_by_fsdp() -> AbstractContextManager[None]:
    """FSDP's own division is left to it on the mesh of experts."""
    correct = apply.apply_fsdp

    def averaging(model: torch.nn.Module, **arguments: Any) -> None:
        correct(model, **arguments)
        for module in model.modules():
            if isinstance(module, StackedExperts) and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(arguments["experts_mesh"].size()))

    return replaced(apply, "apply_fsdp", averaging)


EXPERTS, GATE = "layers.1.moe.experts.*", "layers.1.moe.router.gate.weight"
RIGHT = GRADIENTS_TOLERANCE


@dataclass(frozen=True)
class Seen:
    """The smallest layout that shows a bug, which gradients it changes, and by how much."""

    world: int
    layout: tuple[str, ...]
    names: str
    size: float | None = None
    """|a - b| / |a|; None: any amount."""
    loss: float | None = None
    """First loss, by the right one; None: any other."""


ON_FOUR = ("--training.local_batch_size=2",)
ALL_TOGETHER = ("--training.local_batch_size=8",)
SEEN: dict[Plant, list[Seen]] = {
    gradients_of_experts_are_multiplied_by_ep: [
        Seen(2, (ep(2),), EXPERTS, size=1.0, loss=1.0),
        Seen(4, (ep(4), *ON_FOUR), EXPERTS, size=3.0, loss=1.0),
    ],
    the_gate_is_not_summed_over_tp: [
        Seen(2, (TP2, *ALL_TOGETHER), GATE, loss=1.0),
    ],
    results_are_combined_by_another_index: [
        Seen(2, (TP2, ep(2), *ALL_TOGETHER), "*"),
    ],
    tokens_are_counted_on_each_tp_rank: [
        Seen(4, (TP2, *cp(2, "ring"), ep(2), *ALL_TOGETHER), "*", size=0.5, loss=0.5),
    ],
    gradients_of_experts_are_averaged_by_fsdp: [
        Seen(4, (ep(2), *ON_FOUR), EXPERTS, size=0.5, loss=1.0),
    ],
}


def train(job: list[str], *, plant: Plant | None = None) -> pj.Trained:
    with strong_experts():
        if plant is None:
            return pj.train(job, sizes=SIZES)
        with plant():
            return pj.train(job, sizes=SIZES)


def gaps(results: list[pj.Trained], reference: pj.Trained) -> dict[str, float]:
    """Return by how much each gradient differs."""
    ours = pj.whole(results, lambda result: result.gradients)
    assert ours.keys() == reference.gradients.keys()
    return {
        name: compare_gradients({name: wanted}, {name: ours[name]}).largest
        for name, wanted in reference.gradients.items()
    }


@pytest.mark.parametrize(
    ("plant", "seen"),
    [(plant, each) for plant, found in SEEN.items() for each in found],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_a_bug_of_experts_is_seen(
    plant: Plant, seen: Seen, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    reference = on_one_device(train, *ONE_STEP, toml=MOE)
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *ONE_STEP, *seen.layout, jobs.UNSAVED]
    results = ranks.run(train, job, plant=plant, world=seen.world)
    for name, gap in gaps(results, reference).items():
        assert (gap > RIGHT) == fnmatchcase(name, seen.names), (name, gap)
        if gap > RIGHT and seen.size is not None:
            assert gap == pytest.approx(seen.size, rel=1e-3), name
    factor = results[0].rows[0]["loss"] / reference.rows[0]["loss"]
    if seen.loss is not None:
        assert factor == pytest.approx(seen.loss, rel=1e-5)
    else:
        assert abs(factor - 1) > 1e-5


# --- recomputation


def _is_again() -> bool:
    """Whether this runs in a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


@contextmanager
def choices_and_numbers_are_made_anew() -> Iterator[None]:
    """A recomputed block chooses other experts, as after a near tie, and tells how many rows."""

    def choose(choose: Callable[..., Tensor], scores: Tensor, bias: Tensor | None) -> Tensor:
        return choose(-scores if _is_again() else scores, bias)

    with (
        replaced(activation, "_choose_once", choose),
        replaced(expert, "keep_for_recomputation", lambda work: work()),
    ):
        yield


def choices_are_made_anew() -> AbstractContextManager[None]:
    """Other tokens go to each expert, but as many: no shape tells."""

    def choose(choose: Callable[..., Tensor], *scores_and_bias: Tensor | None) -> Tensor:
        ids = choose(*scores_and_bias)
        return ids.roll(1, dims=1) if _is_again() else ids

    return replaced(activation, "_choose_once", choose)


def train_or_fail(job: list[str], *, plant: Plant) -> pj.Trained | str:
    try:
        return train(job, plant=plant)
    except CheckpointError as error:
        return str(error)


@pytest.mark.parametrize("plant", [choices_and_numbers_are_made_anew, choices_are_made_anew])
def test_a_choice_made_anew_in_recomputation_is_seen(
    plant: Plant, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    """By torch, where the rows that come have another number, else by the gradients."""
    reference = on_one_device(train, *ONE_STEP, toml=MOE)
    how = (ep(2), *HOW["recomputed"], jobs.UNSAVED)
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), *ONE_STEP, *how]
    found = ranks.run(train_or_fail, job, plant=plant, world=2)
    if plant is choices_and_numbers_are_made_anew:
        assert all("have different metadata" in said for said in found)
    else:
        found_gaps = gaps(found, reference)
        assert {found_gaps[name] > RIGHT for name in found_gaps if ".moe." in name} == {True}


# --- checkpoints and files


@contextmanager
def one_ranks_experts_are_saved() -> Iterator[None]:
    """Local parts are given for whole tensors, of which a checkpoint takes one rank's."""
    correct = state.model_tensors

    def tensors(model: Any) -> dict[str, Tensor]:
        return {
            name: t.to_local() if ".experts." in name and isinstance(t, DTensor) else t
            for name, t in correct(model).items()
        }

    with replaced(state, "model_tensors", tensors):
        yield


def save(job: list[str], *, plant: Plant) -> jobs.Result:
    with plant():
        return jobs.train(job)


def test_a_checkpoint_with_one_ranks_experts_is_seen(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    job = [*jobs.write_job(tmp_path, MOE, cache=cache), "--training.steps=1", ep(2)]
    ranks.run(save, job, plant=one_ranks_experts_are_saved, world=2)
    with pytest.raises(RankError, match=r"layers\.1\.moe\.experts\.w1.*\[4, 24, 32\]"):
        ranks.run(begin, job, world=2)


def test_names_of_experts_that_are_dropped_are_seen() -> None:
    spec = qwen3_moe.SPEC
    sizes = replace(spec.flavors["tiny8"], **SIZES)
    model = spec.build_meta(sizes)
    ours = [name for name, _ in model.named_parameters()]
    some = {n: theirs for n, theirs in spec.hf.names.items() if not n.endswith("experts.w3")}
    for names, said in ((spec.hf.names, ""), (some, "no name for layers.1.moe.experts.w3")):
        found = Names(replace(spec.hf, names=names), sizes).find_misnamed(ours) or ""
        assert found.endswith(said)
        assert bool(found) == bool(said)
