"""The optimizer: torch's own, with weight decay only where it belongs.

Norm scales and biases are not decayed: pulling them to zero does not regularise the function that a
layer computes. Name patterns decide which parameters those are; they form a parameter group.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.parts import HasParameters
from torchtitan.optim.settings import OptimizerConfig


def build_optimizer(model: HasParameters, *, settings: OptimizerConfig) -> torch.optim.Optimizer:
    """Build the optimizer over the parameters of `model` that require gradients."""
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    kept = {
        name
        for name in named
        if any(fnmatchcase(name, pattern) for pattern in settings.no_decay_params)
    }
    groups = [
        {
            "params": [p for name, p in named.items() if name not in kept],
            "weight_decay": settings.weight_decay,
        },
        {"params": [p for name, p in named.items() if name in kept], "weight_decay": 0.0},
    ]
    # a rank whose layers are all frozen keeps one, empty: torch refuses an optimizer without any
    groups = [group for group in groups if group["params"]] or groups[:1]
    implementation = settings.implementation
    if settings.name == "SGD" and implementation == "fused":
        implementation = "foreach"  # torch's fused SGD does not support sharded parameters
    common: dict[str, Any] = {
        "lr": settings.lr,
        "fused": implementation == "fused",
        "foreach": implementation == "foreach",
    }
    if settings.name == "SGD":
        return torch.optim.SGD(groups, momentum=settings.momentum, **common)
    adam = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}[settings.name]
    return adam(groups, betas=(settings.beta1, settings.beta2), eps=settings.eps, **common)


def skips_by_itself(optimizer: torch.optim.Optimizer, *, device: torch.device) -> bool:
    """Tell whether `take_step` changes nothing if the norm, on `device`, is not finite.

    That needs the weights on the same device: elsewhere the flag would be read before it arrives.
    """
    weights = optimizer.param_groups[0]["params"][:1]
    return bool(optimizer.defaults.get("fused")) and all(
        weight.device.type == device.type for weight in weights
    )


def take_step(optimizer: torch.optim.Optimizer, *, norm: Tensor) -> None:
    """Update the weights by their gradients, whose global norm is `norm`, and clear these.

    A fused kernel reads on the device whether the norm is finite, by the flag that torch's gradient
    scaler sets. With the others the caller must have checked it.
    """
    if skips_by_itself(optimizer, device=norm.device):
        optimizer.found_inf = (~norm.isfinite()).float()  # type: ignore[attr-defined]
    optimizer.step()
    optimizer.zero_grad()
