"""Optimizers named by import path.

An optimizer that keeps anything but tensors in its state, or starts from other values than zeros,
would change its course at a resume. So `check_custom` compares one step of a small parameter from
each state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any

import torch
from torch import Tensor

from torchtitan.base.custom import convert_errors, instantiate
from torchtitan.base.errors import ConfigError
from torchtitan.optim.settings import OptimizerConfig

NAME = "optimizer.name"


def build_custom(
    groups: list[dict[str, Any]], *, settings: OptimizerConfig
) -> torch.optim.Optimizer:
    """Build the optimizer at the import path `optimizer.name`."""
    fixed = {"params": groups, "lr": settings.lr, "weight_decay": settings.weight_decay}
    if taken := sorted(fixed.keys() & settings.options):
        rule = "must be arguments without a setting of their own"
        raise ConfigError.at("optimizer.options", f"{rule}, got {', '.join(taken)}")
    made = instantiate(settings.name, key=NAME, kwargs=fixed | settings.options)
    if not isinstance(made, torch.optim.Optimizer):
        rule = f"'{settings.name}' must be a torch.optim.Optimizer"
        raise ConfigError.at(NAME, f"{rule}, got {made!r:.80}")
    step = made.step

    def checked_step(_: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        with convert_errors(settings.name, key=NAME):
            return step(*args, **kwargs)

    made.step = MethodType(checked_step, made)  # type: ignore[method-assign]
    return made


def check_custom(
    settings: OptimizerConfig, *, create_state: Callable[[torch.optim.Optimizer], None]
) -> None:
    """Check that a checkpoint can hold the state of a custom optimizer.

    `create_state` creates the state as it is before a checkpoint is loaded. Raises ConfigError if
    the state is not only tensors, or does not start as zeros.
    """

    def first_step(*, state_first: bool) -> tuple[Tensor, Mapping[str, object]]:
        p = torch.ones(2, 3, requires_grad=True)
        groups = [{"params": [p], "weight_decay": settings.weight_decay, "lr_scale": 1.0}]
        optimizer = build_custom(groups, settings=settings)
        if state_first:
            create_state(optimizer)
        p.grad = torch.full_like(p, 0.5)
        optimizer.step()
        return p.detach(), optimizer.state[p]

    weight, state = first_step(state_first=False)
    for key, value in state.items():
        if not isinstance(value, Tensor):
            rule = f"'{settings.name}' must keep only tensors in its state, for checkpoints"
            raise ConfigError.at(NAME, f"{rule}, got {value!r:.60} for {key!r}")
    if not torch.equal(weight, first_step(state_first=True)[0]):
        raise ConfigError.at(
            NAME,
            f"'{settings.name}' must initialize its state with zeros, because checkpoint loading "
            f"allocates zeros",
        )
