"""A world of any size in one process, and stand-ins for what would need the other ranks.

The trainer's own code runs in it for one rank: collectives of torch's `fake` backend return at
once, and tensors are fake, with shapes and no contents. Some places look at contents, or hide from
dispatch what is allocated; they are replaced here, and nowhere else:

    the storages that FSDP frees and takes again     no operator does it
    the streams in which FSDP allocates              each has memory of its own
    DTensor's propagation of shapes                  it runs operators on whole tensors
    FSDP's padding of shards                         it asks for addresses
    how many tokens other ranks send to experts      an even load is assumed
    gradients in small chunks for the norm           only on a CPU
    RMSNorm as several operators                     a GPU has one kernel for it
    the head's gradient in thousands of products     those of one chunk are copied for the others
    the number of a pipeline's microbatches          its table may leave some out
    the collector of garbage                         it would come at any time

What a stage sends is taken to be gone at once; NCCL keeps it until the other stage has it, which is
at most one microbatch's stream for each send on its way.
"""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_group
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.profiler import record_function
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.ranks import end_process_group
from torchtitan.models.interface import Compute, GroupedExperts
from torchtitan.models.moe import multiply_grouped, multiply_per_expert
from torchtitan.optim import clip, loss
from torchtitan.parallel.execution import Batch
from torchtitan.parallel.expert import Exchange
from torchtitan.parallel.pipeline.schedules import Runtime
from torchtitan.tools.plan.tape import WORLD, Entry, Tape

FUSED = (torch.ops.aten._fused_rms_norm.default, torch.ops.aten._fused_rms_norm_backward.default)
"""Operators with a kernel on a GPU alone. With one on a CPU too, dispatch goes the way of a GPU: by
these operators and their own rules for autograd and DTensor. A norm whose input and weight have
different types remains several operators, as there."""
ACTION = "PP:"
"""How torch begins the name of the profiler's range around each action of a schedule."""


@contextmanager
def fake_world(*, rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a job whose other ranks do not exist."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        end_process_group()


def axes_by_group(mesh: Mesh) -> dict[str, list[str]]:
    """Return the axes by the names of the process groups that have their ranks, those over which
    FSDP shards and copies last."""
    axes = defaultdict(list, {dist.group.WORLD.group_name: [WORLD]})  # type: ignore[union-attr]
    for view, names in (
        (mesh.data, ("dp", "cp", "tp")),
        (mesh.params, ("pp", "tp")),
        (mesh.experts, ("ep", "dp_replicate", "efsdp")),
        (mesh.params, ("dp_replicate", "fsdp")),
    ):
        for name in names:
            group = view.get_group(name)
            at = (
                0
                if name in ("cp", "tp", "pp", "ep") and group.size() > 1
                else len(axes[group.group_name])
            )
            axes[group.group_name].insert(at, name)
    return dict(axes)


@contextmanager
def stand_ins(tape: Tape, *, are_fake: bool = True) -> Iterator[None]:
    """Replace what a fake world cannot run, and tell `tape` what it would not see.

    `are_fake`: tensors have no contents, so what is known to come again need not be computed.
    """
    resize = torch.UntypedStorage.resize_
    allocate, gather = DefaultReduceScatter.allocate, fsdp_group.foreach_all_gather
    find_shapes = ShardingPropagator._propagate_tensor_meta_non_cached
    wait, num_reductions = FSDPParamGroup.wait_for_unshard, 0

    def resized(storage: torch.UntypedStorage, size: int) -> None:
        tape.resized(storage, size)
        resize(storage, size)

    def allocated(*args: Any, **kwargs: Any) -> Tensor:
        nonlocal num_reductions
        num_reductions += 1
        # first what is reduced, beside computing, then the result, in a stream of its own
        is_result = num_reductions % 2 == 0
        pool, kind = ("reduce", "gradients") if is_result else ("compute", "communication")
        with tape.within(pool=pool, kind=kind):
            return allocate(*args, **kwargs)

    def gathered(params: Any, group: Any, is_async: bool, *args: Any) -> Any:
        # a pipeline asks for weights ahead and asynchronously, which takes no stream of its own
        with tape.within(pool="compute" if is_async else "gather", kind="gathered weights"):
            return gather(params, group, is_async, *args)

    def shaped(*args: Any, **kwargs: Any) -> Any:
        with tape.within(is_paused=True):
            return find_shapes(*args, **kwargs)

    def of_block(work: Callable[..., Any]) -> Callable[..., Any]:
        def worked(group: Any, *args: Any, **kwargs: Any) -> Any:
            tape.mark_between(group.modules)
            kind = "gathered weights" if work is wait else tape.kind
            with tape.within(kind=kind, is_sharding=True):
                return work(group, *args, **kwargs)

        return worked

    with ExitStack() as stack, _actions_seen(tape), _collects_nothing():
        kernels = stack.enter_context(torch.library._scoped_library("aten", "IMPL"))
        for operator in FUSED:
            kernels.impl(operator, decomposition_table[operator], "CPU")
        for name in ("unshard", "wait_for_unshard", "reshard", "post_backward"):
            work = getattr(FSDPParamGroup, name)
            stack.enter_context(patch.object(FSDPParamGroup, name, of_block(work)))
        for owner, name, value in (
            (torch.UntypedStorage, "resize_", resized),
            (DefaultReduceScatter, "allocate", allocated),
            (fsdp_group, "foreach_all_gather", gathered),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", shaped),
            (FSDPParam, "reset_sharded_param", _keep),
            (clip, "CHUNK", 1 << 62),
            (loss, "_add_product", _copied(loss._add_product, tape, are_fake=are_fake)),
        ):
            stack.enter_context(patch.object(owner, name, value))
        yield


@contextmanager
def _collects_nothing() -> Iterator[None]:
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _copied(work: Callable[..., None], tape: Tape, *, are_fake: bool) -> Callable[..., None]:
    """Return a function that runs `work`, which changes a tensor in place and leaves nothing else
    behind, once for each set of shapes; then its entries are copied."""
    if not are_fake:
        return work
    seen: dict[object, list[Entry]] = {}

    def worked(*tensors: Tensor) -> None:
        entries = tape.record.entries
        start = len(entries)
        key = (tape.place, *((x.shape, x.stride(), x.dtype) for x in tensors))
        if key not in seen:
            work(*tensors)
            seen[key] = [
                entry._replace(born=entry.born - start) if entry.what == "death" else entry
                for entry in entries[start:]
            ]
            return
        entries += [
            entry._replace(born=entry.born + start) if entry.what == "death" else entry
            for entry in seen[key]
        ]

    return worked


@contextmanager
def _actions_seen(tape: Tape) -> Iterator[None]:
    """Tell `tape` where the actions of a pipeline's schedule begin and end, and let the schedule
    take more microbatches than its table has."""
    enter, leave, run = record_function.__enter__, record_function.__exit__, Runtime.run

    def entered(scope: record_function) -> record_function:
        if scope.name.startswith(ACTION):
            tape.begin_action(scope.name.removeprefix(ACTION))
        return enter(scope)

    def left(scope: record_function, *args: Any) -> None:
        leave(scope, *args)
        if scope.name.startswith(ACTION):
            tape.begin_action("")

    def run_first(runtime: Runtime, microbatches: Sequence[Batch]) -> None:
        runtime._schedule._n_microbatches = len(microbatches)
        run(runtime, microbatches)

    with (
        patch.object(record_function, "__enter__", entered),
        patch.object(record_function, "__exit__", left),
        patch.object(Runtime, "run", run_first),
    ):
        yield


def load_evenly(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Let every expert of this rank multiply as many tokens as any other, in `dtype`."""
    for module in model.modules():
        if not isinstance(module, GroupedExperts):
            continue
        if module.compute is multiply_grouped and dtype != torch.bfloat16:
            module.compute = multiply_per_expert  # as a GPU does
        if isinstance(module.exchange, Exchange):
            module.exchange = _EvenExchange(module.exchange)
        else:
            module.exchange = partial(_multiply_evenly, module.exchange)


def _multiply_evenly(
    exchange: Callable[..., Tensor],
    compute: Compute,
    x_NC: Tensor,
    counts_E: Tensor,
    weights: Sequence[Tensor],
) -> Tensor:
    return exchange(partial(_compute_evenly, compute), x_NC, counts_E, weights)


def _compute_evenly(
    compute: Compute, x_NC: Tensor, counts_E: Tensor, weights: Sequence[Tensor]
) -> Tensor:
    even = _even(len(x_NC), len(counts_E))
    counts_E = torch.tensor(even)
    counts_E.tolist = lambda: even  # type: ignore[method-assign]  # a fake tensor knows no numbers
    return compute(x_NC, counts_E, weights)


def _even(total: int, num: int) -> list[int]:
    """Return `num` numbers that add up to `total` and are as equal as can be."""
    return [total // num + (i < total % num) for i in range(num)]


class _EvenExchange(Exchange):
    """Exchanges rows of which every expert of every rank gets as many."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange._group)
        self._num_rows = 0

    def __call__(self, compute: Compute, x_NC: Tensor, *args: Any) -> Tensor:
        self._num_rows = len(x_NC)
        return super().__call__(partial(_compute_evenly, compute), x_NC, *args)

    def _exchange_counts(self, counts_RL: Tensor) -> tuple[list[int], list[int], Tensor]:
        came_RL = torch.empty_like(counts_RL)
        dist.all_to_all_single(came_RL, counts_RL.contiguous(), group=self._group)
        torch.cat([counts_RL.sum(1, keepdim=True), came_RL], 1)
        ranks, local = counts_RL.shape
        even = _even(self._num_rows, ranks * local)
        sent = [sum(even[rank * local :][:local]) for rank in range(ranks)]
        own = dist.get_rank(self._group)
        came = torch.tensor([even[own * local :][:local]] * ranks)
        return sent, [sent[own]] * ranks, came


def _keep(_: FSDPParam) -> None:
    """Leave a shard as it is, padded since its storage exists: of a fake one no address tells."""
