"""Expert parallelism: each rank holds some of a layer's experts, and tokens travel to them.

FSDP gathers the weights that a block multiplies by, but a layer's experts may have a hundred times
the weights that a token needs. So each of `ep` adjacent ranks keeps E / ep experts, sharded over
the remaining axes (`efsdp`) like every other parameter, and each token's row is sent to the ranks
of its experts and back, twice in forward and twice in backward:

    4 x (B S K / ranks of the sequence) x C numbers per layer; (ep - 1) / ep of them leave the rank

compared with 3 x E H C weights, gathered twice and scattered once.

Every rank sends its own tokens. Under data and context parallelism it has no other tokens. Under
tensor parallelism it sends those of its part of the sequence, even if the stream is replicated. So
an `ep` peer may be a rank of dp_shard, cp or tp, and gradients need no factor, because each token
passes through its experts once. Tensor parallelism never shards experts: the products would be
narrow, and all of its ranks would multiply the same tokens.

The host must ask for the number of rows before it can allocate memory for them. This waits for the
device once per layer, only in forward: backward uses the same numbers, and a recomputed block has
recorded them, with the order of the rows. (torch's `all_to_all_single_autograd` leaks memory under
recomputation, and a fixed capacity per expert would drop tokens.)

Shapes: N rows of this rank, M rows received, C width, R ranks, E experts, L experts per rank.
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
from torchtitan.models.moe import invert, multiply_grouped, multiply_per_expert, reorder
from torchtitan.parallel.activation import keep_for_recomputation

logger = logging.getLogger(__name__)


def check_expert_parallel(model: LanguageModel, *, parallelism: ParallelismConfig) -> None:
    """Raise ConfigError unless the degree divides the experts of every layer."""
    ep, key = parallelism.expert_parallel_degree, "parallelism.expert_parallel_degree"
    if not _all_experts(model):
        raise ConfigError.at(key, f"must be 1, got {ep}: the model has no experts")
    if uneven := find_uneven_experts(model, ep=ep):
        raise ConfigError.at(key, f"must divide the experts of a layer, got {uneven}")


def find_uneven_experts(model: nn.Module, *, ep: int) -> str:
    """Describe the numbers of experts that `ep` does not divide, and the degrees that fit. Empty if
    it fits."""
    sizes = {len(p) for experts in _all_experts(model) for p in experts.parameters()}
    if not any(size % ep for size in sizes):
        return ""
    common = gcd(*sizes)
    fitting = ", ".join(str(n) for n in range(1, common + 1) if common % n == 0)
    counts = " and ".join(map(str, sorted(sizes)))
    return f"{ep} for {counts}; degrees that fit are {fitting}"


def apply_expert_parallel(model: nn.Module, *, mesh: DeviceMesh) -> None:
    """Shard the experts of each layer over the ranks of `mesh`, in order and in place."""
    exchange = Exchange(mesh.get_group())
    for experts in _all_experts(model):
        for name, weight in list(experts.named_parameters(recurse=False)):
            # None: parameters are on the meta device, so there is nothing to send
            sharded = distribute_tensor(weight, mesh, [Shard(0)], src_data_rank=None)
            experts.register_parameter(name, nn.Parameter(sharded))
        experts.exchange = exchange


def _all_experts(model: nn.Module) -> list[GroupedExperts]:
    return [module for module in model.modules() if isinstance(module, GroupedExperts)]


def apply_grouped_products(model: nn.Module, *, device_type: str, dtype: torch.dtype) -> None:
    """Multiply experts by grouped products if there is a kernel for them, in place.

    Otherwise experts are multiplied one by one. The log states the choice.
    """
    ours = [module for module in _all_experts(model) if module.compute is multiply_per_expert]
    if not ours:
        return
    sizes = {size for experts in ours for p in experts.parameters() for size in p.shape[1:]}
    obstacle = why_not_grouped(sizes, device_type=device_type, dtype=dtype)
    for experts in ours if not obstacle else []:
        experts.compute = multiply_grouped
    logger.info(
        "Experts are multiplied %s",
        f"one by one: grouped products {obstacle}" if obstacle else "by grouped products",
    )


def why_not_grouped(sizes: Iterable[int], *, device_type: str, dtype: torch.dtype) -> str:
    """Return the reason why grouped products cannot be used, or an empty string.

    torch has one kernel, for bfloat16 on capabilities 9 and 10. On other GPUs, those of capability
    12 included, it multiplies group by group, and waits for the device.
    """
    kinds = (torch.bfloat16,) if device_type == "cuda" else (torch.bfloat16, torch.float32)
    if dtype not in kinds:
        return f"take no {str(dtype).removeprefix('torch.')} on this device"
    if odd := [size for size in sizes if size * dtype.itemsize % 16]:
        return f"take rows of a multiple of 16 bytes, not of {min(odd) * dtype.itemsize}"
    if device_type == "cuda" and torch.cuda.get_device_capability()[0] not in (9, 10):
        return "have no kernel on this GPU"
    return ""


class Exchange:
    """Sends rows to the ranks of their experts, multiplies them there, and sends them back."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._size = group, dist.get_world_size(group)

    def __call__(
        self, compute: Compute, x_NC: Tensor, counts_E: Tensor, weights: Sequence[Tensor]
    ) -> Tensor:
        """Multiply rows that are sorted by expert, `counts_E` rows per expert, on all ranks."""
        counts_RL = counts_E.unflatten(0, (self._size, -1))
        sent, received, counts_L, order_M, back_M = keep_for_recomputation(
            lambda: self._prepare(counts_RL, compute)
        )
        x_MC = _AllToAllRows.apply(x_NC, sent, received, self._group)
        local = [w.to_local() if isinstance(w, DTensor) else w for w in weights]
        out_MC = compute(reorder(x_MC, order_M, back_M), counts_L, local)
        out_MC = reorder(out_MC, back_M, order_M)
        out_NC: Tensor = _AllToAllRows.apply(out_MC, received, sent, self._group)
        return out_NC

    def _prepare(
        self, counts_RL: Tensor, compute: Compute
    ) -> tuple[list[int], list[int], Tensor, Tensor, Tensor]:
        """Return the numbers of rows sent to each rank, received from each rank and per expert,
        and the order by expert of those received, with its inverse."""
        sent, received, received_RL, on_host_RL = self._exchange_counts(counts_RL)
        order_M = _order_by_expert(received_RL, num_rows=sum(received))
        # only products of one expert at a time need the numbers on the host
        counts_RL = on_host_RL if compute is multiply_per_expert else received_RL
        return sent, received, counts_RL.sum(0), order_M, invert(order_M)

    def _exchange_counts(self, counts_RL: Tensor) -> tuple[list[int], list[int], Tensor, Tensor]:
        """Return the numbers of rows sent to each rank and received from each rank, and those
        received by rank and expert, on the device and on the host."""
        received_RL = torch.empty_like(counts_RL)
        dist.all_to_all_single(received_RL, counts_RL.contiguous(), group=self._group)
        sent_R1 = counts_RL.sum(1, keepdim=True)
        on_host = torch.cat([sent_R1, received_RL], 1).cpu()  # the host waits for the device
        on_host_RL = on_host[:, 1:]
        return on_host[:, 0].tolist(), on_host_RL.sum(1).tolist(), received_RL, on_host_RL


def _order_by_expert(received_RL: Tensor, *, num_rows: int) -> Tensor:
    """Return the order by expert of rows that arrived by rank and then by expert.

    Rows of one expert stay in the order of their ranks. If tokens are in order over the ranks, this
    is the order on one device.
    """
    expert_L = torch.arange(received_RL.shape[1], device=received_RL.device)
    expert_M = (
        expert_L.expand(received_RL.shape)
        .flatten()
        .repeat_interleave(received_RL.flatten(), output_size=num_rows)
    )
    return expert_M.argsort(stable=True)


class _AllToAllRows(torch.autograd.Function):
    """Sends rows to other ranks, with a number of rows per rank. Gradients travel back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.sent, ctx.received, ctx.group = sent, received, group
        return _all_to_all(x, sent, received, group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _all_to_all(grads[0], ctx.received, ctx.sent, ctx.group), None, None, None


def _all_to_all(
    x_NC: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup
) -> Tensor:
    out_MC = x_NC.new_empty(sum(received), *x_NC.shape[1:])
    dist.all_to_all_single(out_MC, x_NC.contiguous(), received, sent, group=group)
    return out_MC
