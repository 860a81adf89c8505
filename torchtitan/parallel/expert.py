"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to them.

FSDP gathers what a block multiplies by; a layer's experts may be a hundred times what a token needs
of them. So each of `ep` neighbouring ranks keeps E / ep whole experts, sharded over the other ranks
(`efsdp`) as everything else is, and a token's row is sent to the rank of each expert it chose and
back. What travels are rows, twice in forward and twice in backward:

    4 x (B S K / ranks of the sequence) x C numbers a layer, of which (ep - 1) / ep leave the rank

against 3 x E H C numbers of weights, gathered twice and scattered once.

Every rank sends its own tokens: under data and context parallelism it has no others, under tensor
parallelism those of its own part of the sequence, also where the stream is not split. So an `ep`
neighbour may be a rank of dp_shard, cp or tp, and no gradient needs a factor: each token went
through its experts once. Experts are never split by tensor parallelism: the products would be
narrow, and the same tokens be multiplied on all of these ranks.

How many rows come is not known to the host until it asks, and memory for them must be allocated:
one wait for the device a layer, in forward alone, since backward goes the same way back, and a
recomputed block has kept the numbers. (`all_to_all_single_autograd` of torch leaks under
recomputation, and a fixed capacity for each expert would drop tokens.)

Shapes: N rows of this rank, M rows that came to it, C width, R ranks, E experts, L of a rank.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from torchtitan.base.errors import ConfigError
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import Compute, GroupedExperts, LanguageModel
from torchtitan.models.moe import multiply_grouped, multiply_per_expert, reorder
from torchtitan.parallel.activation import keep_for_recomputation

logger = logging.getLogger(__name__)


def check_expert_parallel(model: LanguageModel, *, parallelism: ParallelismConfig) -> None:
    """Check that the degree divides the experts of every layer.

    Raises:
        ConfigError: It does not, or there are none.
    """
    ep, key = parallelism.expert_parallel_degree, "parallelism.expert_parallel_degree"
    if ep > 1 and not _all_experts(model):
        raise ConfigError.at(key, f"must be 1, got {ep}: the model has no experts")
    if uneven := find_undealt(model, ep=ep):
        raise ConfigError.at(key, f"must divide the experts of a layer, got {uneven}")


def find_undealt(model: nn.Module, *, ep: int) -> str:
    """Say which numbers of experts `ep` does not divide and which degrees fit; nothing where it
    fits."""
    sizes = {len(p) for experts in _all_experts(model) for p in experts.parameters()}
    if not any(size % ep for size in sizes):
        return ""
    common = gcd(*sizes)
    fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    shown = " and ".join(map(str, sorted(sizes)))
    return f"{ep} for {shown}; they can be dealt out to {fitting}"


def apply_expert_parallel(model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Deal out the experts of each layer to the ranks of `mesh`, in order and in place."""
    exchange = Exchange(mesh.get_group())
    for experts in _all_experts(model):
        for name, weight in list(experts.named_parameters(recurse=False)):
            # None: parameters are on the meta device, there is nothing to send
            dealt = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(dealt))
        experts.exchange = exchange


def _all_experts(model: nn.Module) -> list[GroupedExperts]:
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def group_products(model: nn.Module, *, device_type: str, dtype: torch.dtype) -> None:
    """Have experts multiplied by grouped products where there is a kernel for them, else one after
    another; the log says which."""
    ours = [module for module in _all_experts(model) if module.compute is multiply_per_expert]
    if not ours:
        return
    sizes = {size for experts in ours for p in experts.parameters() for size in p.shape[1:]}
    obstacle = find_obstacle(sizes, device_type=device_type, dtype=dtype)
    for experts in ours if not obstacle else []:
        experts.compute = multiply_grouped
    logger.info(
        "Experts are multiplied %s",
        f"one after another: grouped products {obstacle}" if obstacle else "by grouped products",
    )


def find_obstacle(sizes: Iterable[int], *, device_type: str, dtype: torch.dtype) -> str:
    """Say what grouped products need that is not so; nothing where they can be had.

    torch has one kernel for bfloat16 on GPUs from Hopper on; on others it splits them up itself,
    and waits for the device in doing so.
    """
    kinds = (torch.bfloat16,) if device_type == "cuda" else (torch.bfloat16, torch.float32)
    if dtype not in kinds:
        return f"take no {str(dtype).removeprefix('torch.')} here"
    if odd := [size for size in sizes if size * dtype.itemsize % 16]:
        return f"take rows of a multiple of 16 bytes, not of {min(odd) * dtype.itemsize}"
    if device_type == "cuda" and torch.cuda.get_device_capability() < (9, 0):
        return "have no kernel of their own on this GPU"
    return ""


class Exchange:
    """Takes rows to the ranks of their experts, has them multiplied there, and takes them back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def __call__(
        self, compute: Compute, x_NC: Tensor, counts_E: Tensor, weights: Sequence[Tensor]
    ) -> Tensor:
        """Multiply rows that are sorted by expert, `counts_E` for each, on all ranks together."""
        counts_RL = counts_E.unflatten(0, (self._size, -1))
        sent, came, came_RL = keep_for_recomputation(lambda: self._tell(counts_RL))
        x_MC = _Travel.apply(x_NC, sent, came, self._group)
        order_M = _by_expert(came_RL.to(x_NC.device, non_blocking=True), num_rows=len(x_MC))
        back_M = order_M.argsort()
        here = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        out_MC = compute(reorder(x_MC, order_M, back_M), came_RL.sum(0), here)
        out_NC: Tensor = _Travel.apply(reorder(out_MC, back_M, order_M), came, sent, self._group)
        return out_NC

    def _tell(self, counts_RL: Tensor) -> tuple[list[int], list[int], Tensor]:
        """Return how many rows go to each rank, how many come from each, and on the host how many
        come by rank and expert."""
        came_RL = torch.empty_like(counts_RL)
        dist.all_to_all_single(came_RL, counts_RL.contiguous(), group=self._group)
        sent_R1 = counts_RL.sum(1, keepdim=True)
        on_host = torch.cat([sent_R1, came_RL], 1).cpu()  # the host waits for the device
        came_RL = on_host[:, 1:]
        return on_host[:, 0].tolist(), came_RL.sum(1).tolist(), came_RL


def _by_expert(came_RL: Tensor, *, num_rows: int) -> Tensor:
    """Return the order by expert of rows that came by rank and then expert.

    Those of an expert stay in the order of their ranks, and so in that of one device's tokens if
    these follow one another over the ranks.
    """
    expert_RL = torch.arange(came_RL.shape[1], device=came_RL.device).expand(came_RL.shape)
    expert_M = expert_RL.flatten().repeat_interleave(came_RL.flatten(), output_size=num_rows)
    return expert_M.argsort(stable=True)


class _Travel(torch.autograd.Function):
    """Rows to other ranks, so many to each and so many from each; gradients go the way back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.came, ctx.group = sent, came, group
        return _all_to_all(x, sent, came, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.came, ctx.sent, ctx.group), None, None, None


def _all_to_all(x_NC: Tensor, sent: list[int], came: list[int], group: dist.ProcessGroup) -> Tensor:
    out_MC = x_NC.new_empty(sum(came), *x_NC.shape[1:])
    dist.all_to_all_single(out_MC, x_NC.contiguous(), came, sent, group=group)
    return out_MC
