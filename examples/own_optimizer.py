"""A custom optimizer: Lion (arXiv:2302.06675), which updates by the sign of a momentum.

    python -m torchtitan.train --optimizer.name examples.own_optimizer:Lion --optimizer.lr 1e-4 \
        --optimizer.options.betas "[0.95, 0.98]" --training.steps 20

Any element-wise torch.optim.Optimizer works: its parameters may be shards (DTensor), in any layout.
It must read `lr` and `weight_decay` from its groups in each step, and zero-initialize its state.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """One momentum for each weight, half the memory of AdamW's state."""

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: Sequence[float] = (0.9, 0.99)
    ) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": tuple(betas)})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        """Update each weight by its gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                momentum = state["momentum"]
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.sign(momentum.lerp(p.grad, 1 - beta1)), alpha=-group["lr"])
                momentum.lerp_(p.grad, 1 - beta2)
