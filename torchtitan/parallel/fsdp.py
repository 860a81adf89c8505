"""Data parallelism by FSDP2, for every layout: sharded, replicated, or both.

`fully_shard` over one axis shards parameters, gradients and optimizer state (FSDP); over two it
shards along the second and copies along the first (HSDP); with a second axis of one rank it is
plain data parallelism (DDP). One mechanism, so that mixed precision, offloading, checkpoints and
the scale of gradients are the same in all of them.

A block's weights are gathered twice a step, for forward and for backward, and freed in between;
kept, or kept by a few ranks each, they cost memory and save traffic. What backward needs first is
kept: the last block and the head are gathered once. So is the embedding, whose backward reads no
weights. The next group's weights are asked for before a block computes, forward as FSDP2 does it
backward by itself, so that they are on their way even where the host is late with the next block.

Gradients are *summed*: the loss is divided by the valid tokens of the global batch before backward,
so nothing is left to average.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
)

from torchtitan.base.errors import ConfigError
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.settings import ParallelismConfig


@dataclass(frozen=True, kw_only=True)
class FSDPPolicy:
    """How parameters are gathered, computed with and reduced."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool | int
    """Whether weights are freed after forward; a number: each so many ranks keep them together."""
    cpu_offload: bool
    keep_last: bool = True
    """Whether the last block's weights are kept for backward, which begins with them."""

    def arguments(self, mesh: DeviceMesh) -> dict[str, Any]:
        """Return the keyword arguments of `fully_shard`."""
        # inputs keep their type: the rotary cos and sin must stay float32
        precision = MixedPrecisionPolicy(
            param_dtype=self.param_dtype,
            reduce_dtype=self.reduce_dtype,
            cast_forward_inputs=False,
        )
        arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
        if self.cpu_offload:
            pin = mesh.device_type == "cuda"
            arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
        return arguments


def name_reshard(settings: ParallelismConfig, *, dims: ParallelDims) -> str:
    """Return fsdp_reshard_after_forward with the numbers that have a name as that name.

    Weights that one rank keeps for itself are never freed; kept by all ranks together, always.
    """
    asked = settings.fsdp_reshard_after_forward
    if not asked.isdecimal():
        return asked
    return {dims.fsdp: "always", 1: "never"}.get(int(asked), asked)


def find_reshard(settings: ParallelismConfig, *, dims: ParallelDims) -> bool | int:
    """Return what becomes of weights after forward, as `FSDPPolicy` has it.

    Raises:
        ConfigError: A number of ranks is given, and does not divide those that share the weights,
            or there are axes with which FSDP2 knows no such groups.
    """
    asked = name_reshard(settings, dims=dims)
    if not asked.isdecimal():
        return {"always": True, "never": False, "default": dims.pp == 1}[asked]
    num_ranks, key = int(asked), "[parallelism] fsdp_reshard_after_forward"
    # FSDP2 makes the groups from a rank's own part of the mesh: elsewhere others would be made
    degrees = {"pipeline_parallel_degree": dims.pp, "tensor_parallel_degree": dims.tp}
    mistakes = [
        f"{key} is a number of ranks between 1 and all only where {name} is 1, got {num_ranks} "
        f'with {degree}; write "default", "always" or "never"'
        for name, degree in degrees.items()
        if degree > 1
    ]
    if not num_ranks or dims.fsdp % num_ranks:
        fits = [str(n) for n in range(2, dims.fsdp) if dims.fsdp % n == 0]
        mistakes.append(
            f"{key} as a number must divide the {dims.fsdp} ranks that share the weights, got "
            f"{num_ranks}; "
            + (f"try {', '.join(fits)}, or " if fits else "")
            + 'write "always" (all of them) or "never" (1)'
        )
    if mistakes:
        raise ConfigError(mistakes)
    return num_ranks


def apply_fsdp(model: nn.Module, *, mesh: DeviceMesh, policy: FSDPPolicy) -> None:
    """Shard the blocks of `model`, then what is left of it, over `mesh`, in place."""
    arguments, reshard = policy.arguments(mesh), policy.reshard_after_forward
    order: list[Any] = []  # in which forward asks for them
    blocks = list(model.layers.values())
    # a tied embedding is used at both ends: it stays in the root's group, gathered throughout
    has_ends = not model.config.tie_embeddings
    if has_ends and model.tok_embeddings is not None:
        fully_shard(model.tok_embeddings, reshard_after_forward=reshard, **arguments)
        # its backward adds rows up and reads none
        model.tok_embeddings.set_unshard_in_backward(False)
        order.append(model.tok_embeddings)
    for block in blocks:
        is_kept = policy.keep_last and block is blocks[-1]
        fully_shard(block, reshard_after_forward=False if is_kept else reshard, **arguments)
        order.append(block)
    # used last in forward and first in backward: freed in between it would be gathered twice
    last = [module for module in (model.norm, model.output) if module is not None]
    if has_ends and last:
        fully_shard(last, reshard_after_forward=False, **arguments)
        order.append(last[0])
    fully_shard(model, reshard_after_forward=False, **arguments)
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # neither call recurses, and gloo knows no scaled sum
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def reshard(model: nn.Module) -> None:
    """Free what a forward pass has gathered: without a backward nothing else does.

    Until then some parameters are whole ones, and a checkpoint would save them as those of a rank.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def sync_gradients(model: nn.Module, *, last: bool) -> None:
    """Sum gradients across copies only in the backward of a step's last microbatch.

    The sum across shards takes place in every microbatch: it frees the unsharded gradient.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)
