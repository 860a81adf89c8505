"""The state of an optimizer before its first step, for checkpoints to hold or to fill."""

from __future__ import annotations

import torch
from torch import Tensor


def create_state(optimizer: torch.optim.Optimizer) -> None:
    """Make the state that the first step would begin with, and change no weight."""
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = 0.0
        for p in group["params"]:
            p.grad = torch.zeros_like(p)
    optimizer.step()
    optimizer.zero_grad()
    for group, lr in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = lr
    for state in optimizer.state.values():
        for key, value in state.items():
            if isinstance(value, Tensor):
                value.fill_(1.0 if key == "mu_product" else 0.0)  # NAdam's product of decays
