"""Bugs that trainers had, each put in the place of the right code, and the jobs that show it.

A test that no bug can fail shows nothing. So `MUTANTS` has each bug as a function that takes the
right code and returns the wrong one, with the name that it replaces. `seen` are the smallest jobs
in which it must be noticed, by an oracle that has no such bug: the same job on one device, as in
test_matrix.py, plain PyTorch in float64, or a run that was never stopped. test_mutants.py trains
them. Bugs of one function are planted beside its own tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate

from torchtitan import build as assembly
from torchtitan import trainer, validate
from torchtitan.checkpoint import restore, state
from torchtitan.data.documents import TextSource
from torchtitan.data.loader import Loader
from torchtitan.models import init
from torchtitan.models.init import local_part
from torchtitan.models.interface import Documents, GroupedExperts
from torchtitan.models.moe import MoE
from torchtitan.optim import clip, loss, muon
from torchtitan.optim.balance import Balance
from torchtitan.optim.loss import IGNORE_INDEX, count_valid
from torchtitan.parallel import activation, execution, expert, fsdp, tensor
from torchtitan.parallel.context import attention as context_attention
from torchtitan.parallel.context.layout import SequenceLayout
from torchtitan.parallel.context.shard import SequenceShard
from torchtitan.parallel.execution import Batch
from torchtitan.parallel.pipeline import layout as pipeline_layout
from torchtitan.parallel.pipeline import schedules
from torchtitan.parallel.pipeline.execution import Pipeline, TiedEmbedding
from torchtitan.parallel.pipeline.layout import Stages

Code = Any
"""A function, or a class of which an instance is made."""

# --- the loss and its divisor


def _with_loss(change: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Code], Code]:
    """Change the loss of each microbatch, given its labels too."""

    def bug(build_loss: Code) -> Code:
        def build(*args: Any, **settings: Any) -> Code:
            right = build_loss(*args, **settings)
            return lambda x, weight, labels: change(right(x, weight, labels), labels)

        return build

    return bug


def _mean(value: Tensor, labels: Tensor) -> Tensor:
    # half of the labels are valid, more or less
    return value / count_valid(labels).clamp(min=1) * labels.numel() / 2


def _own_gradient(value: Tensor, labels: Tensor) -> Tensor:
    return value if dist.get_rank() == 0 else value.detach() + 0 * value


def without_the_last_microbatch(forward_backward: Code) -> Code:
    def dropping(self: Any, batches: Sequence[Batch], *, divisor: Tensor) -> Any:
        return forward_backward(self, batches[:-1], divisor=divisor)

    return dropping


# --- sums over ranks


def without(reduction: Any) -> Callable[[Code], Code]:
    """Reduce nothing in this way over ranks, inside of the code."""

    def bug(correct: Code) -> Code:
        def call(*args: Any, **settings: Any) -> Any:
            all_reduce: Any = dist.all_reduce

            def others(value: Tensor, op: Any = dist.ReduceOp.SUM, **of_op: Any) -> Any:
                return None if op == reduction else all_reduce(value, op, **of_op)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(dist, "all_reduce", others)
                return correct(*args, **settings)

        return call

    return bug


without_sums = without(dist.ReduceOp.SUM)
without_the_largest = without(dist.ReduceOp.MAX)


def averaging(apply_fsdp: Code) -> Code:
    """Leave FSDP its own division."""

    def call(model: nn.Module, *, mesh: Any, **settings: Any) -> None:
        apply_fsdp(model, mesh=mesh, **settings)
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(mesh.size()))

    return call


def averaging_experts(apply_fsdp: Code) -> Code:
    def call(model: nn.Module, **settings: Any) -> None:
        apply_fsdp(model, **settings)
        for module in model.modules():
            if isinstance(module, GroupedExperts) and isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(float(settings["experts_mesh"].size()))

    return call


# --- tensor parallelism


def gathered_inputs_keep_half(to_dtensor: Code) -> Code:
    def call(local: Tensor, mesh: Any, placement: Any) -> Any:
        if placement.is_shard():
            return to_dtensor(local, mesh, placement)
        return to_dtensor(local.detach() + (local - local.detach()) / 2, mesh, placement)

    return call


def copied_adapters_are_local(local: Code) -> Code:
    def call(tensor: Any) -> Any:
        is_copied = tensor.ndim == 2 and tensor.placements[0].is_replicate()
        return tensor.to_local() if is_copied else local(tensor)

    return call


def second_shard_flipped(materialize: Code) -> Code:
    """Lay out the rows of one tensor-parallel shard of one matrix in another order."""

    def call(part: nn.Module, **settings: Any) -> None:
        materialize(part, **settings)
        weight: Any = part.get_parameter("layers.0.attention.wq.weight")
        if weight.device_mesh.get_local_rank("tp") == 1:
            local = local_part(weight.detach())
            local.copy_(local.flip(0))

    return call


def even_shards(shard: Code) -> Code:
    """Let the shards of 21 rows begin where those of 22 would."""

    def call(index: Tensor, placement: Any, degree: int, rank: int) -> Any:
        size = len(shard(index, placement, degree, rank))
        return index[rank * size : (rank + 1) * size]

    return call


def of_own_heads(shared: Code) -> Code:
    class OfOwnHeads(tensor.GatherOutput):
        def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
            def gather(_: nn.Module, inputs: object, x: Tensor) -> Tensor:
                whole = tensor.to_dtensor(x, device_mesh, self.stream)
                return whole.redistribute(placements=[Replicate()]).to_local()

            module.register_forward_hook(gather)
            return module

    return OfOwnHeads


def of_own_tokens(copied: Code) -> Code:
    class OfOwnTokens(tensor.ReplicatedLinear):
        def __init__(self, stream: Any) -> None:
            super().__init__(stream)
            self.tokens = Replicate()

    return OfOwnTokens


# --- context parallelism


def _with_batch(change: Callable[[SequenceShard, Batch, Any], Batch]) -> Callable[[Code], Code]:
    """Change each rank's part of a microbatch, given all of it too."""

    def bug(take: Code) -> Code:
        return lambda self, samples: change(self, take(self, samples), samples)

    return bug


def _labels_shifted(shard: SequenceShard, batch: Batch, samples: Any) -> Batch:
    labels = batch.labels.clone()
    labels[:, -1] = batch.tokens[:, 0]
    return replace(batch, labels=labels)


def _labels_of_another_layout(shard: SequenceShard, batch: Batch, samples: Any) -> Batch:
    layout = SequenceLayout(degree=2, balancer="none")
    places = layout.positions(shard._rank, seq_len=samples["labels"].shape[1])
    return replace(batch, labels=samples["labels"][:, places])


def _own_positions(shard: SequenceShard, batch: Batch, samples: Any) -> Batch:
    assert batch.positions is not None
    return replace(batch, positions=torch.arange(len(batch.positions)))


def _all_labels(shard: SequenceShard, batch: Batch, samples: Any) -> Batch:
    is_masked = batch.labels == IGNORE_INDEX
    return replace(batch, labels=torch.where(is_masked, batch.tokens, batch.labels))


def own_blocks(blocks: Code) -> Code:
    def call(self: Any, source: int, **settings: Any) -> Any:
        return blocks(self, source, **settings) if source == self.rank else []

    return call


# --- pipelines


def halves_swapped(name_modules: Code) -> Code:
    def call(counts: tuple[int, ...]) -> Stages:
        first, last = name_modules(counts)
        ours, theirs = ([n for n in stage if n.startswith("layers.")] for stage in (first, last))
        return (first[0], *theirs), (*ours, *last[len(theirs) :])

    return call


def forgotten(add_gradient: Code) -> Code:
    def call(self: TiedEmbedding) -> None:
        if self.copy is not None:
            self.copy.grad = None

    return call


def scaled_by_microbatches(build: Code) -> Code:
    return lambda *args, **settings: build(*args, **{**settings, "scale_grads": True})


# torch 2.15 reduces FSDP's gradients in a method of its own
REDUCES = "start_gradient_reduction"
REDUCES = REDUCES if hasattr(schedules.Stage, REDUCES) else "perform_reduce_grad"

# --- documents


def documents_of_the_first_rows(rows: Code) -> Code:
    def call(self: Batch, part: slice) -> Batch:
        assert self.documents is not None
        return replace(rows(self, part), documents=self.documents[: part.stop - part.start])

    return call


def labels_across(item: Code) -> Code:
    def call(self: TextSource, k: int) -> Any:
        splits, self._splits_labels = self._splits_labels, False
        try:
            return item(self, k)
        finally:
            self._splits_labels = splits

    return call


def one_token_late(from_flat: Code) -> Code:
    def call(lengths: Tensor, *, seq_len: int) -> Documents:
        rows = [list(row) for row in from_flat(lengths, seq_len=seq_len).lengths]
        for row in rows:
            if len(row) > 1 and row[-1] > 1:
                row[0], row[-1] = row[0] + 1, row[-1] - 1
        return Documents(tuple(map(tuple, rows)))

    return call


# --- experts


class _Scaled(torch.autograd.Function):
    """A tensor as it is, whose gradient is a multiple."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0] * ctx.factor, None


def experts_are_copies(exchange: Code) -> Code:
    """Count each of the ranks that send tokens to an expert as a copy of it."""

    def call(self: Any, compute: Code, x: Tensor, counts: Tensor, weights: Sequence[Tensor]) -> Any:
        def scaled(x: Tensor, counts: Tensor, here: Sequence[Tensor]) -> Any:
            return compute(x, counts, [_Scaled.apply(w, self._size) for w in here])

        return exchange(self, scaled, x, counts, weights)

    return call


def local_weight(product: Code) -> Code:
    return lambda x, weight, *, product: product(x, weight.to_local())


def sequence_first(route: Code) -> Code:
    """Take flat tokens for sequence first, which is right for one sample at a time."""

    def call(self: MoE, x_BSC: Tensor) -> Tensor:
        out_BSC: Tensor = route(self, x_BSC)
        return out_BSC.transpose(0, 1).reshape(out_BSC.shape)

    return call


def _is_again() -> bool:
    """Whether this runs in a backward pass."""
    return bool(torch._C._current_graph_task_id() != -1)


def other_numbers_again(choose_once: Code) -> Code:
    """Choose other experts in the recomputation, as after a near tie."""
    return lambda choose, scores, bias: choose(-scores if _is_again() else scores, bias)


def other_tokens_again(choose_once: Code) -> Code:
    """Send other tokens to each expert in the recomputation, but as many."""

    def call(choose: Code, *given: Tensor | None) -> Any:
        ids = choose(*given)
        return ids.roll(1, dims=1) if _is_again() else ids

    return call


def _balance_with(name: str, other: Callable[..., Any]) -> Callable[[Code], Code]:
    """Replace an attribute of the balance while a method of it runs."""

    def bug(method: Code) -> Code:
        def call(self: Balance, *args: Any, **settings: Any) -> Any:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(self, name, other(self, *args))
                return method(self, *args, **settings)

        return call

    return bug


def local_experts(model_tensors: Code) -> Code:
    """Give local parts for whole tensors, of which a checkpoint takes one rank's."""
    return lambda model: {
        name: t.to_local() if ".experts." in name and isinstance(t, DTensor) else t
        for name, t in model_tensors(model).items()
    }


# --- Muon


def each_shard_alone(plan_work: Code) -> Code:
    """Send nothing: take a shard for the matrix."""

    def plan(shapes: Mapping[str, Any], boxes: list[dict[str, muon.Box]]) -> list[muon.Matrix]:
        return [
            muon.Matrix(name, None, box.sizes, {rank: whole}, rank, frozenset({rank}))
            for rank, held in enumerate(boxes)
            for name, box in held.items()
            for whole in [muon.Box((0,) * len(box.sizes), box.sizes)]
        ]

    return plan


def owner_alone(plan_work: Code) -> Code:
    """Let the owner of a matrix keep the result for itself."""
    return lambda *args: [replace(m, parts={m.owner: m.parts[m.owner]}) for m in plan_work(*args)]


# --- steps and resuming


def late(set_lr: Code) -> Code:
    held = [0.0]

    def call(optimizer: torch.optim.Optimizer, lr: float) -> None:
        set_lr(optimizer, held[-1])
        held.append(lr)

    return call


def without_optimizer(read_tensors: Code) -> Code:
    def call(path: Any, component: str, **settings: Any) -> None:
        if component != "optimizer":
            read_tensors(path, component, **settings)

    return call


def one_sample_on(load_state_dict: Code) -> Code:
    def call(self: Loader, state: dict[str, Any]) -> None:
        load_state_dict(self, {**state, "position": state["position"] + 1})

    return call


def nothing(correct: Code) -> Code:
    return lambda *args, **settings: None


# --- the table


@dataclass(frozen=True)
class Seen:
    """A job that shows a bug, in the words of test_matrix.py."""

    where: str = "one device"
    what: str = "all"
    how: str = ""
    oracle: Literal["one device", "PyTorch", "unstopped", "by sample", "error"] = "one device"
    error: str = ""
    """Text that the error must contain."""


class Mutant:
    """A bug in the place of the code that `owner` has under `name`."""

    def __init__(
        self,
        bug: Callable[[Code], Code],
        owner: Any,
        name: str,
        *seen: Seen,
        also: tuple[Callable[[Code], Code], Any, str] | None = None,
    ) -> None:
        self.seen = seen
        self._places = [(bug, owner, name), *([also] if also is not None else [])]

    @property
    def names(self) -> set[str]:
        """What it replaces."""
        return {name for _, _, name in self._places}

    @contextmanager
    def planted(self) -> Iterator[set[str]]:
        """Plant it; yield the names whose wrong code has been called."""
        called: set[str] = set()
        with pytest.MonkeyPatch.context() as patch:
            for bug, owner, name in self._places:
                patch.setattr(owner, name, _noting(bug(getattr(owner, name)), name, called))
            yield called


def _noting(wrong: Code, name: str, called: set[str]) -> Code:
    def call(*args: Any, **settings: Any) -> Any:
        called.add(name)
        return wrong(*args, **settings)

    return call


ACCUMULATING = "accumulating"

MUTANTS: dict[str, Mutant] = {
    "mean of means": Mutant(_with_loss(_mean), assembly, "build_loss", Seen(how=ACCUMULATING)),
    "each rank counts the loss": Mutant(
        _with_loss(lambda value, labels: value * 2),
        assembly,
        "build_loss",
        Seen("tp 2"),
    ),
    "a masked label is learnt": Mutant(
        _with_batch(_all_labels), SequenceShard, "take", Seen(oracle="PyTorch")
    ),
    "masked labels count in the validation": Mutant(
        lambda count_valid: lambda labels: torch.tensor(labels.numel()),
        validate,
        "count_valid",
        Seen(oracle="by sample"),
    ),
    "microbatch dropped": Mutant(
        without_the_last_microbatch,
        execution.WholeModel,
        "forward_backward",
        Seen(how=ACCUMULATING),
    ),
    "microbatch dropped in a pipeline": Mutant(
        without_the_last_microbatch,
        Pipeline,
        "forward_backward",
        Seen("pp 2", how=ACCUMULATING),
    ),
    "learning rate a step late": Mutant(late, trainer, "set_lr", Seen(oracle="PyTorch")),
    "norm of the own shard": Mutant(without_sums, trainer, "global_norm", Seen("fsdp 2")),
    "copies count in the norm": Mutant(
        lambda num_copies: lambda grad: 1,
        clip,
        "num_copies",
        Seen("fsdp 2 x tp 2"),
    ),
    "gradients averaged": Mutant(
        averaging,
        fsdp,
        "apply_fsdp",
        Seen("fsdp 2"),
        Seen("ddp 2"),
        Seen("pp 2 Interleaved x fsdp 2"),
    ),
    "copies not reduced": Mutant(
        lambda sync_gradients: lambda model, last: sync_gradients(model, last=False),
        execution,
        "sync_gradients",
        Seen("ddp 2"),
    ),
    "copies not reduced in a pipeline": Mutant(
        without_sums, schedules.Stage, REDUCES, Seen("pp 2 ZBV x ddp 2")
    ),
    "uneven shards begin elsewhere": Mutant(even_shards, init, "_shard", Seen("fsdp 2 x tp 2")),
    "rows of a tp shard in another order": Mutant(
        second_shard_flipped, assembly, "materialize", Seen("tp 2")
    ),
    "norms not summed over tp": Mutant(
        lambda norm: lambda stream: norm(Replicate()),
        tensor,
        "ReplicatedNorm",
        Seen("tp 2"),
    ),
    "largest logit not shared": Mutant(without_the_largest, loss._Head, "_loss", Seen("tp 2")),
    "gathered inputs keep their own gradient": Mutant(
        gathered_inputs_keep_half, tensor, "to_dtensor", Seen("tp 2, stream copied")
    ),
    "copied adapters keep their own gradient": Mutant(
        copied_adapters_are_local,
        tensor,
        "_to_local",
        Seen("tp 2", "adapter"),
    ),
    "latents keep the gradient of own heads": Mutant(
        of_own_heads, tensor, "GatherOutput", Seen("tp 2", "DeepSeek")
    ),
    "latents keep the gradient of own tokens": Mutant(
        of_own_tokens, tensor, "ReplicatedLinear", Seen("tp 2", "DeepSeek")
    ),
    "labels shifted in a cp shard": Mutant(
        _with_batch(_labels_shifted), SequenceShard, "take", Seen("cp 2 allgather")
    ),
    "labels of another cp layout": Mutant(
        _with_batch(_labels_of_another_layout), SequenceShard, "take", Seen("cp 2 ring")
    ),
    "positions of the cp shard alone": Mutant(
        _with_batch(_own_positions), SequenceShard, "take", Seen("cp 2 ring")
    ),
    "attention to the own cp shard alone": Mutant(
        own_blocks, context_attention.Ranks, "blocks", Seen("cp 2 ring")
    ),
    "gradients not summed over cp": Mutant(
        _with_loss(_own_gradient),
        assembly,
        "build_loss",
        Seen("cp 2 ring"),
    ),
    "stages in the wrong order": Mutant(
        halves_swapped, pipeline_layout, "name_modules", Seen("pp 2")
    ),
    "gradients divided by microbatches": Mutant(
        scaled_by_microbatches,
        schedules,
        "_Schedule",
        Seen("pp 2"),
    ),
    "weights freed between halved backwards": Mutant(
        nothing,
        pipeline_layout,
        "check_split_backward",
        Seen("pp 2 ZBV x fsdp 2, weights freed"),
    ),
    "tied copy stale": Mutant(nothing, TiedEmbedding, "refresh_copy", Seen("pp 2 ZBV", "tied")),
    "tied gradient lost": Mutant(
        forgotten,
        TiedEmbedding,
        "add_gradient",
        Seen("pp 2", "tied"),
    ),
    "documents of the first microbatch": Mutant(
        documents_of_the_first_rows, Batch, "_rows", Seen("pp 2", "documents")
    ),
    "labels across documents": Mutant(
        labels_across, TextSource, "__getitem__", Seen("pp 2", "documents")
    ),
    "documents end a token late": Mutant(
        one_token_late, Documents, "from_flat", Seen("pp 2", "documents")
    ),
    "gradients of experts times ep": Mutant(
        experts_are_copies,
        expert.Exchange,
        "__call__",
        Seen("ep 2", "experts"),
        Seen("ep 4", "experts"),
    ),
    "gradients of experts averaged": Mutant(
        averaging_experts,
        fsdp,
        "apply_fsdp",
        Seen("ep 2 x fsdp 2", "experts"),
    ),
    "gate not summed over tp": Mutant(
        local_weight, tensor, "_local_product", Seen("tp 2", "experts")
    ),
    "results combined by another index": Mutant(
        sequence_first, MoE, "route", Seen("ep 2 x tp 2", "experts")
    ),
    "tokens counted on each tp rank": Mutant(
        lambda count_valid: lambda labels: 2 * count_valid(labels),
        trainer,
        "count_valid",
        Seen("cp 2 ring x tp 2, stream copied"),
    ),
    "experts chosen anew": Mutant(
        other_tokens_again,
        activation,
        "_choose_once",
        Seen("ep 2", "experts", "recomputed"),
    ),
    "experts and numbers of rows chosen anew": Mutant(
        other_numbers_again,
        activation,
        "_choose_once",
        Seen("ep 2", "experts", "recomputed", oracle="error", error="have different metadata"),
        also=(lambda keep: lambda work: work(), expert, "keep_for_recomputation"),
    ),
    "experts of one rank saved": Mutant(
        local_experts,
        state,
        "model_tensors",
        Seen("ep 2", "experts", oracle="error", error="layers.1.moe.experts.w1"),
    ),
    "biases moved by own counts": Mutant(
        without_sums, Balance, "update", Seen("fsdp 2", "balanced")
    ),
    "choices counted again": Mutant(
        lambda choose_once: lambda choose, *given: choose(*given),
        activation,
        "_choose_once",
        Seen("one device", "balanced", "recomputed"),
    ),
    "sequences balanced by their parts": Mutant(
        _balance_with("_groups", lambda self, *args: []),
        Balance,
        "_counts_of_sequences",
        Seen("cp 2 ring", "balanced"),
        Seen("tp 2", "balanced"),
    ),
    "global loss by counts of this step": Mutant(
        _balance_with("_last_LE", lambda self, *args: self._counts_LE),
        Balance,
        "_loss",
        Seen("one device", "balanced", ACCUMULATING),
    ),
    "balance divided by the microbatch": Mutant(
        _balance_with("_divisor", lambda self, *args: torch.tensor(float(args[3][..., 0].numel()))),
        Balance,
        "_loss",
        Seen("one device", "balanced", ACCUMULATING),
    ),
    "each shard orthogonalised alone": Mutant(
        each_shard_alone,
        muon,
        "plan_work",
        Seen("fsdp 2", "Muon"),
        Seen("tp 2", "Muon"),
    ),
    "copies of a matrix not updated": Mutant(owner_alone, muon, "plan_work", Seen("ddp 2", "Muon")),
    "optimizer not restored": Mutant(
        without_optimizer, restore, "read_tensors", Seen(oracle="unstopped")
    ),
    "position one sample on": Mutant(
        one_sample_on, Loader, "load_state_dict", Seen(oracle="unstopped")
    ),
    "generators not restored": Mutant(nothing, restore, "set_rng", Seen(oracle="unstopped")),
}
