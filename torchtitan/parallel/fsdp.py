"""Data parallelism by FSDP2, for every layout: sharded, replicated, or both.

`fully_shard` over one axis shards parameters, gradients and optimizer state (FSDP). Over two axes
it replicates along the first and shards along the second (HSDP), and if the second axis has one
rank it is plain data parallelism (DDP). One mechanism means that mixed precision, offloading,
checkpoints and the scale of gradients are the same in all of them.

A block's weights are gathered twice per microbatch, for forward and for backward, and then freed.
Keeping them, on each rank or shared by a few, costs memory and saves traffic. The weights that
backward needs first are kept: the last block and the head are gathered once. So is the embedding,
whose backward reads no weights. The next group's weights are requested before a block computes (in
backward FSDP2 does so by itself), so they arrive in time even if the host is late with the next
block.

The experts of a layer are a separate group, over the ranks that hold the same experts. They are
gathered while attention computes, and the next block is requested before they wait for the number
of their tokens.

Gradients are *summed*: the loss is divided by the valid tokens of the global batch before backward,
so no average is left to compute.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from torchtitan.data.settings import TrainingConfig
from torchtitan.models.init import local_part
from torchtitan.models.interface import GroupedExperts, router_biases
from torchtitan.parallel.layout import Reshard


def apply_fsdp(
    model: nn.Module,
    *,
    mesh: DeviceMesh,
    training: TrainingConfig,
    reshard: Reshard,
    experts_mesh: DeviceMesh | None = None,
) -> None:
    """Shard the blocks of a model or a pipeline stage, then its remaining parameters, in place.

    `mesh` has the data-parallel axes, `experts_mesh` the ranks that hold the same experts.
    """
    arguments = _arguments(training, mesh=mesh, model=model)
    order: list[Any] = []  # groups in the order of forward
    blocks = list(model.layers.values())
    # a tied embedding is used at both ends, so it stays gathered in the group of the root
    has_ends = not model.config.tie_embeddings
    if has_ends and model.tok_embeddings is not None:
        frees = reshard.after_forward
        fully_shard(model.tok_embeddings, reshard_after_forward=frees, **arguments)
        # its backward adds to rows and reads none
        model.tok_embeddings.set_unshard_in_backward(False)
        order.append(model.tok_embeddings)
    for block in blocks:
        is_kept = reshard.keeps_last and block is blocks[-1]
        frees = False if is_kept else reshard.after_forward
        experts = [module for module in block.modules() if isinstance(module, GroupedExperts)]
        for module in experts:
            _shard_experts(module, mesh=experts_mesh or mesh, arguments=arguments, frees=frees)
        fully_shard(block, reshard_after_forward=frees, **arguments)
        order += [block, *experts]
    # last in forward and first in backward: if freed in between it would be gathered twice
    last = [module for module in (model.norm, model.output) if module is not None]
    if has_ends and last:
        fully_shard(last, reshard_after_forward=False, **arguments)
        order.append(last[0])
    fully_shard(model, reshard_after_forward=False, **arguments)
    for module, following in pairwise(order):
        module.set_modules_to_forward_prefetch([following])
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # neither call is recursive, and gloo has no scaled sum
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _shard_experts(
    experts: GroupedExperts, *, mesh: DeviceMesh, arguments: Mapping[str, Any], frees: bool | int
) -> None:
    """Shard a layer's experts by expert, or by width if there are fewer experts than ranks."""
    shapes, num_ranks = [local_part(p).shape for p in experts.parameters()], mesh.shape[-1]
    by_width = shapes[0][0] < num_ranks and all(shape[1] % num_ranks == 0 for shape in shapes)
    if not mesh.mesh.equal(arguments["mesh"].mesh):
        frees = bool(frees)  # FSDP2 cannot group a number of ranks that are not adjacent
    fully_shard(
        experts,
        shard_placement_fn=(lambda _: Shard(1)) if by_width else None,
        reshard_after_forward=frees,
        **{**arguments, "mesh": mesh},
    )


def _arguments(training: TrainingConfig, *, mesh: DeviceMesh, model: nn.Module) -> dict[str, Any]:
    """Return the arguments that all calls of `fully_shard` share."""
    precision = MixedPrecisionPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        cast_forward_inputs=False,  # cos and sin of the rotary embedding must stay float32
    )
    arguments: dict[str, Any] = {"mesh": mesh, "mp_policy": precision}
    arguments["ignored_params"] = set(router_biases(model))
    if training.enable_cpu_offload:
        pin = mesh.device_type == "cuda"
        arguments["offload_policy"] = CPUOffloadPolicy(pin_memory=pin)
    return arguments


def free_gathered(model: nn.Module) -> None:
    """Free the weights that a forward without a backward left gathered.

    Until then some parameters are unsharded, and a checkpoint would save them as one rank's shard.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
