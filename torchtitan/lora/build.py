"""From the [lora] section to a function that gives a model its adapters."""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from functools import partial

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.lora.layer import apply_lora, linear_names
from torchtitan.lora.settings import LoRAConfig
from torchtitan.models.contract import LanguageModel
from torchtitan.models.trained import check_pattern

Adapt = Callable[[LanguageModel], None]
"""Changes a model on the meta device, in place."""


def build_adapt(settings: LoRAConfig, *, model: LanguageModel) -> Adapt | None:
    """Return what gives a model like `model` its adapters, in place; None without [lora].

    Raises:
        ConfigError: A pattern matches no layer, or one that has a bias.
    """
    if not settings.rank:
        return None
    linears = linear_names(model)
    key = "lora.modules"
    for pattern in settings.modules:
        check_pattern(pattern, linears, key=key, what="linear layer")
    if not settings.modules:
        rule = 'must name a layer, got none; try "layers.*"'
        raise ConfigError(Violation((key,), rule))
    biased = [
        name
        for name in linears
        if any(fnmatchcase(name, pattern) for pattern in settings.modules)
        and model.get_submodule(name).bias is not None
    ]
    if biased:
        some = ", ".join(biased[:4]) + (" ..." if len(biased) > 4 else "")
        rule = f"must be linear layers without a bias, got {some}; name others"
        raise ConfigError(Violation((key,), rule))
    return partial(apply_lora, rank=settings.rank, alpha=settings.alpha, patterns=settings.modules)
