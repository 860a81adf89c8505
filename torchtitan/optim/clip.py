"""Clipping by the global norm of gradients that are sharded over ranks.

A gradient is a plain tensor, or a DTensor with a local part. Every rank adds up the squares of its
local parts, weighted by 1/n if n ranks hold copies, and one sum over all ranks gives the norm that
a single device would compute, for any mix of sharding, copies and pipeline stages.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from torchtitan.models.init import local_part

CHUNK = 1 << 16
"""Elements per partial norm on CPU."""


def num_copies(grad: Tensor) -> int:
    """Return how many ranks hold each element of a gradient."""
    if not isinstance(grad, DTensor):
        return 1
    assert not any(p.is_partial() for p in grad.placements), "gradients must be reduced by now"
    copies = 1
    for axis, placement in enumerate(grad.placements):
        if placement.is_replicate():
            copies *= grad.device_mesh.size(axis)
    return copies


def _chunks(local: Tensor) -> Sequence[Tensor]:
    # the CPU kernel adds squares one by one in float32: over 4 million it is off by 7e-5, over a
    # chunk by 1e-8; the GPU kernel adds in a tree
    if local.device.type != "cpu" or not local.numel():  # torch 2.11: empty fake tensors fail
        return (local,)
    return local.flatten().split(CHUNK)


@torch.no_grad()
def global_norm(parameters: Iterable[nn.Parameter], *, loss: Tensor) -> Tensor:
    """Return the 2-norm of all gradients, a float32 scalar, the same on every rank.

    `loss` is this rank's loss. If any rank's loss is not finite, neither is the norm, so that this
    one number decides on every rank whether to skip the step. The mesh of a sharded gradient must
    have all ranks of its pipeline stage (`parallel.parallelize` checks it).
    """
    grads = [p.grad for p in parameters if p.grad is not None]
    chunks_by_copies: dict[int, list[Tensor]] = defaultdict(list)
    for grad in grads:
        chunks_by_copies[num_copies(grad)] += _chunks(local_part(grad))
    total = loss.double() * 0.0
    for copies, chunks in chunks_by_copies.items():
        dtype = torch.promote_types(chunks[0].dtype, torch.float32)
        norms = torch._foreach_norm(chunks, 2.0, dtype=dtype)
        total += torch.stack(norms).to(loss.device).double().square().sum() / copies
    dist.all_reduce(total)
    return total.sqrt().float()


@torch.no_grad()
def clip_gradients(
    parameters: Iterable[nn.Parameter], *, norm: Tensor, max_norm: Tensor | float
) -> None:
    """Scale the gradients in place so that their global norm is at most `max_norm`."""
    grads = [local_part(p.grad) for p in parameters if p.grad is not None]
    if not grads:  # all of this rank's layers are frozen
        return
    scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    torch._foreach_mul_(grads, scale.to(grads[0].device))


class SkippingOptimizer(torch.optim.Optimizer):
    """Base of optimizers whose `step` honours `found_inf`, as torch's fused kernels do."""

    found_inf: Tensor | None = None
    device: torch.device  # of the parameters; a rank may have no parameters
