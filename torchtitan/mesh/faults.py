"""Faults that concern all ranks at once.

A step whose loss or gradient norm is not finite is found on every rank alike, since both enter one
reduced figure (`optim.clip.global_norm`), and no optimizer touches a weight for it. Only then is
the time spent to ask every rank what it saw."""

from __future__ import annotations

import math

import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import NonFiniteError


def raise_if_nonfinite(norm: float, *, loss: Tensor, step: int) -> None:
    """Stop the run where the global gradient norm is not finite.

    `loss` is this rank's share of the loss. Every rank must call this with the same `norm`.

    Raises:
        NonFiniteError: Names the step and the ranks whose own loss is not finite.
    """
    if math.isfinite(norm):
        return
    losses: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    culprits = {rank: value for rank, value in enumerate(losses) if not math.isfinite(value)}
    if culprits:
        seen = "the loss is " + ", ".join(f"{v} on rank {rank}" for rank, v in culprits.items())
    else:
        seen = f"the loss is finite on every rank, but the gradient norm is {norm}"
    raise NonFiniteError(
        f"step {step} must have a finite loss and gradient norm: {seen}. The weights were not "
        f"changed; go on from the last checkpoint with checkpoint.mode = 'continue' and a lower "
        f"optimizer.lr, or start anew in another dump_folder"
    )
