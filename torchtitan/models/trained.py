"""Which parameters of a model are trained; the others keep their values bit for bit.

A parameter that is not trained requires no gradient. All that follows, torch does by itself: none
is computed, backward ends where nothing before it is trained, and the optimizer, which holds what
requires gradients, has no state of it. So there is one place where a parameter is frozen, and every
other part of the library asks `requires_grad`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.base.errors import ConfigError
from torchtitan.models.lora import is_factor


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Tells the parameters that are trained from those that are not, by name."""

    frozen: tuple[str, ...] = ()
    """Shell patterns of names that are not trained."""
    factors_alone: bool = False
    """Whether of all others only the low-rank factors are."""

    def includes(self, name: str) -> bool:
        """Tell whether a parameter is trained."""
        if self.factors_alone and not is_factor(name):
            return False
        return not any(fnmatchcase(name, pattern) for pattern in self.frozen)

    def check(self, names: Collection[str]) -> None:
        """Check the patterns against the names of the whole model.

        Raises:
            ConfigError: A pattern stands for nothing, or nothing is left to train.
        """
        for pattern in self.frozen:
            check_pattern(pattern, names, key="[optimizer] frozen_params", what="parameter")
        if not any(map(self.includes, names)):
            raise ConfigError(
                "[optimizer] frozen_params must leave a parameter to train, got "
                f"{', '.join(self.frozen)}, which freeze all {len(names)}; remove a pattern"
            )

    def freeze_others(self, model: nn.Module) -> None:
        """Let what is not trained require no gradient, in place."""
        for name, parameter in model.named_parameters():
            if not self.includes(name):
                parameter.requires_grad_(False)


def check_pattern(pattern: str, names: Collection[str], *, key: str, what: str) -> None:
    """Check that a shell pattern stands for something.

    Raises:
        ConfigError: It does not; says which names come near.
    """
    if any(fnmatchcase(name, pattern) for name in names):
        return
    near = difflib.get_close_matches(pattern, names, n=3, cutoff=0.4) or sorted(names)[:3]
    raise ConfigError(
        f"{key} '{pattern}' must match a {what} of the model, it matches none; near are "
        f"{', '.join(near)}"
    )
