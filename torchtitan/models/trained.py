"""Which parameters of a model are trained; the others keep their values bit for bit.

A frozen parameter requires no gradient. Torch does the rest: no gradient is computed, backward ends
where nothing before it is trained, and the optimizer, which holds what requires gradients, has no
state for it. So a parameter is frozen in one place, and every other part of the library asks
`requires_grad`.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase

from torch import nn

from torchtitan.base.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Tells by name which parameters are trained."""

    only: tuple[str, ...] = ("*",)
    """Shell patterns of names; what matches none is not trained."""
    frozen: tuple[str, ...] = ()
    """Shell patterns of names that are not trained, whatever `only` says."""

    def includes(self, name: str) -> bool:
        """Tell whether a parameter is trained."""
        is_chosen = any(fnmatchcase(name, pattern) for pattern in self.only)
        return is_chosen and not any(fnmatchcase(name, pattern) for pattern in self.frozen)

    def check(self, names: Collection[str], *, no_weights: Collection[str] = ()) -> None:
        """Check the patterns against the names of the whole model; `no_weights` are never trained.

        Raises:
            ConfigError: A pattern matches nothing, or nothing is left to train.
        """
        for pattern in self.frozen:
            check_pattern(pattern, names, key="optimizer.frozen_params", what="parameter")
        if not any(self.includes(name) for name in names if name not in no_weights):
            raise ConfigError.at(
                "optimizer.frozen_params",
                f"must leave a parameter to train, got {', '.join(self.frozen)}, which freeze all "
                f"{len(names)}; remove a pattern",
            )

    def freeze_others(self, model: nn.Module) -> None:
        """Let the parameters that are not trained require no gradient, in place."""
        for name, parameter in model.named_parameters():
            if not self.includes(name):
                parameter.requires_grad_(False)


def check_pattern(pattern: str, names: Collection[str], *, key: str, what: str) -> None:
    """Check that a shell pattern, given under `key`, matches something.

    Raises:
        ConfigError: It does not; says which names are near.
    """
    if any(fnmatchcase(name, pattern) for name in names):
        return
    near = sorted(sorted(names), key=lambda name: _likeness(pattern, name), reverse=True)[:3]
    raise ConfigError.at(
        key, f"'{pattern}' must match a {what} of the model; near are {', '.join(near)}"
    )


def _likeness(pattern: str, name: str) -> tuple[int, float]:
    """Compare what they share in one piece, as a pattern is shorter than any name, then letters."""
    matcher = difflib.SequenceMatcher(None, pattern, name)
    return matcher.find_longest_match().size, matcher.ratio()
