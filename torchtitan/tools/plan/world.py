"""A world of any size in one process, and substitutes for parts that need the other ranks.

The trainer's own code runs for one rank. Collectives of torch's `fake` backend return at once, and
tensors are fake: they have shapes and no contents. A few functions read contents, or allocate
without an operator. They are replaced here, and in no other file:

    the storages that FSDP frees and allocates       no operator does it
    the streams on which FSDP allocates              each stream has its own memory
    DTensor's propagation of shapes                  it runs operators on unsharded tensors
    FSDP's padding of shards                         it asks for addresses
    tokens that other ranks send to experts          an even load is assumed
    gradients in small chunks for the norm           only on a CPU
    RMSNorm as several operators                     a GPU has one kernel for it
    sums of experts' rows as several operators       a GPU has one kernel for them
    the head's gradient in thousands of products     those of one chunk are copied
    the garbage collector                            it would run at any time
    groups of other ranks                            a world of 16,384 ranks has 70,000 or more

Memory that a stage sends is freed at once. NCCL keeps it until the other stage has received it:
at most one microbatch's stream for each send in progress.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.device_mesh as device_mesh
import torch.distributed.fsdp._fully_shard._fsdp_param_group as fsdp_group
from torch import Tensor, nn
from torch._decomp import decomposition_table
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.library import _scoped_library
from torch.testing._internal.distributed.fake_pg import FakeStore

from torchtitan.base.device import to_device
from torchtitan.checkpoint.storage import paused_gc
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.ranks import end_process_group
from torchtitan.models import moe
from torchtitan.models.interface import Compute, GroupedExperts
from torchtitan.models.moe import multiply_grouped, multiply_per_expert
from torchtitan.optim import clip, loss
from torchtitan.parallel.expert import Exchange
from torchtitan.tools.plan.tape import WORLD, Tape


def _multiply_wide(left: Tensor, right: Tensor, out_dtype: torch.dtype) -> Tensor:
    return torch.bmm(left.to(out_dtype), right.to(out_dtype))


aten = torch.ops.aten
FUSED = (aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)
KERNELS = {**{op: decomposition_table[op] for op in FUSED}, aten.bmm.dtype: _multiply_wide}
"""Operators with a kernel on a GPU only. With one on a CPU too, dispatch takes a GPU's path: these
operators, and their own rules for autograd and DTensor. A norm whose input and weight have
different types remains several operators, as on a GPU."""


@contextmanager
def fake_world(*, rank: int, world_size: int) -> Iterator[None]:
    """Act as one rank of a job. Other ranks, and groups without this rank, do not exist."""
    create = device_mesh.new_group

    def create_own(ranks: Sequence[int], **options: Any) -> Any:
        if rank in ranks:
            return create(ranks, **options)
        return dist.GroupMember.NON_GROUP_MEMBER

    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        with replaced(device_mesh, "new_group", create_own):
            yield
    finally:
        end_process_group()


def axes_by_group(mesh: Mesh) -> dict[str, list[str]]:
    """Return the axes of each process group by its name, with the axes of FSDP last."""
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
    """Replace functions that a fake world cannot run, and notify `tape` of hidden allocations.

    If tensors `are_fake`, they have no contents, so nothing need be added to them.
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
        # first the input of a reduction, on the compute stream, then its result, on its own stream
        is_result = num_reductions % 2 == 0
        pool, purpose = ("reduce", "gradients") if is_result else ("compute", "communication")
        with tape.within(pool=pool, purpose=purpose):
            return allocate(*args, **kwargs)

    def gathered(params: Any, group: Any, is_async: bool, *args: Any) -> Any:
        # a pipeline gathers ahead and asynchronously, without a stream of its own
        with tape.within(pool="compute" if is_async else "gather", purpose="gathered weights"):
            return gather(params, group, is_async, *args)

    def shaped(*args: Any, **kwargs: Any) -> Any:
        with tape.within(is_paused=True):
            return find_shapes(*args, **kwargs)

    def of_block(work: Callable[..., Any]) -> Callable[..., Any]:
        def worked(group: Any, *args: Any, **kwargs: Any) -> Any:
            tape.mark_between(group.modules)
            purpose = "gathered weights" if work is wait else tape.purpose
            with tape.within(purpose=purpose, is_sharding=True):
                return work(group, *args, **kwargs)

        return worked

    sharding = ("unshard", "wait_for_unshard", "reshard", "post_backward")
    with ExitStack() as stack, paused_gc(), _scoped_library("aten", "IMPL") as kernels:
        for operator, kernel in KERNELS.items():
            kernels.impl(operator, kernel, "CPU")
        for owner, name, value in (
            *((FSDPParamGroup, name, of_block(getattr(FSDPParamGroup, name))) for name in sharding),
            (torch.UntypedStorage, "resize_", resized),
            (DefaultReduceScatter, "allocate", allocated),
            (fsdp_group, "foreach_all_gather", gathered),
            (ShardingPropagator, "_propagate_tensor_meta_non_cached", shaped),
            (FSDPParam, "reset_sharded_param", _keep),
            (clip, "CHUNK", 1 << 62),
            (moe, "has_row_kernels", lambda rows: rows.dtype == torch.bfloat16),
            (loss, "FEWEST_TOKENS", {"cpu": loss.FEWEST_TOKENS["cuda"]}),
            (loss, "_add_product", _added_at_once(loss._add_product, tape, are_fake=are_fake)),
        ):
            stack.enter_context(replaced(owner, name, value))
        yield


@contextmanager
def replaced(owner: Any, name: str, value: object) -> Iterator[None]:
    """Set an attribute of a class or module for the time of the context."""
    is_own, before = name in vars(owner), vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


def _added_at_once(
    add: Callable[..., None], tape: Tape, *, are_fake: bool
) -> Callable[[Tensor, Tensor, Tensor], None]:
    """Return a function that records the one kernel that a GPU has for `add`, `loss._add_product`.

    It takes factors of 16 bits and float32 sums, which no operator of a CPU does.
    """

    def added(total_VC: Tensor, left_VM: Tensor, right_MC: Tensor) -> None:
        if left_VM.dtype == total_VC.dtype:
            add(total_VC, left_VM, right_MC)
            return
        tape.add_product("aten::addmm", left_VM, right_MC)
        if not are_fake:
            with tape.within(is_paused=True):
                add(total_VC, left_VM, right_MC)

    return added


def load_evenly(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Give each expert of this rank an equal number of tokens, in `dtype`."""
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
    counts_E = to_device(even, counts_E.device)
    counts_E.tolist = lambda: even  # type: ignore[method-assign]  # a fake tensor has no contents
    return compute(x_NC, counts_E, weights)


def _even(total: int, num: int) -> list[int]:
    """Return `num` numbers that add up to `total` and differ by at most 1."""
    return [total // num + (i < total % num) for i in range(num)]


class _EvenExchange(Exchange):
    """Exchanges rows, an equal number for each expert of each rank."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__(exchange._group)
        self._num_rows = 0

    def __call__(self, compute: Compute, x_NC: Tensor, *args: Any) -> Tensor:
        self._num_rows = len(x_NC)
        return super().__call__(partial(_compute_evenly, compute), x_NC, *args)

    def _exchange_counts(self, counts_RL: Tensor) -> tuple[list[int], list[int], Tensor, Tensor]:
        came_RL = torch.empty_like(counts_RL)
        dist.all_to_all_single(came_RL, counts_RL.contiguous(), group=self._group)
        torch.cat([counts_RL.sum(1, keepdim=True), came_RL], 1)
        ranks, local = counts_RL.shape
        even = _even(self._num_rows, ranks * local)
        sent = [sum(even[rank * local :][:local]) for rank in range(ranks)]
        own = dist.get_rank(self._group)
        came = to_device(even[own * local :][:local] * ranks, counts_RL.device).view(ranks, local)
        return sent, [sent[own]] * ranks, came, came


def _keep(_: FSDPParam) -> None:
    """Leave a shard as it is. FSDP compares addresses, which fake storages lack."""
