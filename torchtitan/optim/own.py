"""An optimizer of the user's own: any torch.optim.Optimizer that works element by element.

The trainer changes no line of it, but needs some things of it, which are tried out on two small
parameters before anything is trained: it reads the rate from its groups in each step, a rate of 0
leaves the weights alone, all that a step changes is in its state, which are tensors (a checkpoint
holds no others), and these begin as zeros (so that they can be made before the first step, and
filled from a checkpoint).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.base.own import load_object, make, within
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.optim.state import create_state

NAME, OPTIONS = "optimizer.name", "optimizer.options"


def make_optimizer(
    groups: list[dict[str, Any]], *, settings: OptimizerConfig, sections: Mapping[str, object]
) -> torch.optim.Optimizer:
    """Build the optimizer that `optimizer.name` names; `sections`: of the user's own.

    Raises:
        ConfigError: It is not there, asks for something else, or is no optimizer.
    """
    offered = {
        "params": groups,
        "lr": settings.lr,
        "weight_decay": settings.weight_decay,
        **settings.options,
        **sections,
    }
    made = make(settings.name, key=NAME, offered=offered)
    if not isinstance(made, torch.optim.Optimizer):
        rule = f"'{settings.name}' must be a torch.optim.Optimizer, got {made!r:.80}"
        raise ConfigError.at(NAME, f"{rule}; inherit from that")
    return made


def check_own(settings: OptimizerConfig, *, sections: Mapping[str, object]) -> None:
    """Try the optimizer out on two small parameters.

    Raises:
        ConfigError: Says what it lacks.
    """
    taken = inspect.signature(load_object(settings.name, key=NAME)).parameters
    for name in settings.options:
        if name in ("params", "lr", "weight_decay") or name in sections:
            raise ConfigError.at(OPTIONS, f"{name!r} has a place of its own; remove it here")
        if name not in taken:
            rule = f"{name!r} is no named argument of {settings.name}{did_you_mean(name, taken)}"
            raise ConfigError.at(OPTIONS, f"{rule}; it takes {', '.join(taken)}")
    plain = _Trial(settings, sections)
    with within(settings.name, key=NAME):
        before, hidden = plain.weights(), plain.hidden()
        plain.step(lr=0.0)
        stayed = torch.equal(before, plain.weights())
        plain.step(lr=0.5)
        moved = not torch.equal(before, plain.weights())
    if not (stayed and moved):
        rule = "must move weights by the lr of its param_groups, read in each step"
        got = "moves none at lr 0.5" if stayed else "moves them at lr 0"
        raise ConfigError.at(NAME, f"'{settings.name}' {rule}, and {got}; mend it")
    if changed := [key for key, value in plain.hidden().items() if hidden.get(key) != value]:
        rule = (
            f"'{settings.name}' must keep what changes in its state, which checkpoints hold, and a "
            f"step changes its {', '.join(changed)}; keep it in self.state[p]"
        )
        raise ConfigError.at(NAME, rule)
    for key, value in plain.state():
        shapes = [p.shape for p in plain.parameters]
        if not isinstance(value, torch.Tensor) or (value.ndim and value.shape not in shapes):
            rule = (
                f"'{settings.name}' must keep tensors of a parameter's shape, or of none, in its "
                f"state, which checkpoints hold, and {key!r} is {value!r:.60}; for a number keep "
                f"torch.zeros(())"
            )
            raise ConfigError.at(NAME, rule)
    fresh, prepared = _Trial(settings, sections), _Trial(settings, sections)
    create_state(prepared.optimizer)
    for trial in (fresh, prepared):
        trial.step(lr=0.5)
        trial.step(lr=0.5)
    if not torch.equal(fresh.weights(), prepared.weights()):
        rule = (
            f"'{settings.name}' must begin with a state of zeros, which is made before the first "
            f"step and filled from checkpoints: with zeros in its state it takes other steps than "
            f"fresh; begin with zeros"
        )
        raise ConfigError.at(NAME, rule)


class _Trial:
    """Two small parameters, and an optimizer of them."""

    def __init__(self, settings: OptimizerConfig, sections: Mapping[str, object]) -> None:
        self.parameters = [
            torch.linspace(-1, 1, 6).reshape(2, 3).requires_grad_(),
            torch.linspace(1, 2, 3).requires_grad_(),
        ]
        groups = [
            {"params": [p], "weight_decay": decay, "lr_scale": 1.0}
            for p, decay in zip(self.parameters, (settings.weight_decay, 0.0), strict=True)
        ]
        self.optimizer = make_optimizer(groups, settings=settings, sections=sections)
        self._num_steps = 0

    def step(self, *, lr: float) -> None:
        """Take a step along a gradient that is another one in each."""
        self._num_steps += 1
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        for p in self.parameters:
            p.grad = torch.cos(p.detach() * self._num_steps)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def weights(self) -> torch.Tensor:
        """Return all elements."""
        return torch.cat([p.detach().flatten() for p in self.parameters])

    def hidden(self) -> dict[str, str]:
        """Return what it keeps outside of its state: in its groups, and as attributes."""
        groups = {
            f"param_groups[{number}][{key!r}]": repr(value)
            for number, group in enumerate(self.optimizer.param_groups)
            for key, value in group.items()
            if key not in ("params", "lr")
        }
        plain = (bool, int, float, str, list, tuple, dict, torch.Tensor)
        return groups | {
            key: repr(value)
            for key, value in vars(self.optimizer).items()
            if isinstance(value, plain) and key not in ("state", "param_groups", "defaults")
            if not key.startswith(("_optimizer_", "_zero_grad", "_patch"))
        }

    def state(self) -> list[tuple[str, object]]:
        """Return name and value of all that it keeps."""
        return [item for kept in self.optimizer.state.values() for item in kept.items()]
