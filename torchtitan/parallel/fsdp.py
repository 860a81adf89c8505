"""Data parallelism by FSDP2, for every layout: sharded, replicated, or both.

`fully_shard` over one axis shards parameters, gradients and optimizer state (FSDP); over two it
shards along the second and copies along the first (HSDP); with a second axis of one rank it is
plain data parallelism (DDP). One mechanism, so that mixed precision, offloading, checkpoints and
the scale of gradients are the same in all of them.

Gradients are *summed*: the loss is divided by the valid tokens of the global batch before backward,
so nothing is left to average.
"""

from __future__ import annotations

from dataclasses import dataclass
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


@dataclass(frozen=True, kw_only=True)
class FSDPPolicy:
    """How parameters are gathered, computed with and reduced."""

    param_dtype: torch.dtype
    reduce_dtype: torch.dtype
    reshard_after_forward: bool
    cpu_offload: bool

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


def apply_fsdp(model: nn.Module, *, mesh: DeviceMesh, policy: FSDPPolicy) -> None:
    """Shard the blocks of `model`, then what is left of it, over `mesh`, in place."""
    arguments = policy.arguments(mesh)
    for block in model.layers.values():
        fully_shard(block, reshard_after_forward=policy.reshard_after_forward, **arguments)
    # a tied embedding is used at both ends: it stays in the root's group, gathered throughout
    if not model.config.tie_embeddings:
        if model.tok_embeddings is not None:
            fully_shard(
                model.tok_embeddings,
                reshard_after_forward=policy.reshard_after_forward,
                **arguments,
            )
        # used last in forward and first in backward: freed in between it would be gathered twice
        last = [module for module in (model.norm, model.output) if module is not None]
        if last:
            fully_shard(last, reshard_after_forward=False, **arguments)
    fully_shard(model, reshard_after_forward=False, **arguments)
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
