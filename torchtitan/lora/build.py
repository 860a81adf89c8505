"""From the [lora] section to a function that gives a model its adapters."""

from __future__ import annotations

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase
from functools import partial

from torchtitan.base.errors import ConfigError
from torchtitan.lora.layer import apply_lora, linear_names
from torchtitan.lora.settings import LoRAConfig
from torchtitan.models.contract import LanguageModel
from torchtitan.models.trained import check_pattern

Adapt = Callable[[LanguageModel], None]
"""Changes a model on the meta device, in place."""


def build_adapt(settings: LoRAConfig, *, model: LanguageModel) -> Adapt | None:
    """Return what gives a model like `model` its adapters, in place; None without [lora].

    Raises:
        ConfigError: A pattern matches no layer.
    """
    if not settings.rank:
        return None
    linears = linear_names(model)
    key = "lora.modules"
    # those of the default may match nothing: experts are no linear layers
    is_default = settings.modules == LoRAConfig().modules
    if not is_default or not _match(settings.modules, linears):
        for pattern in settings.modules:
            check_pattern(pattern, linears, key=key, what="linear layer")
    if not settings.modules:
        raise ConfigError.at(key, 'must name a layer, got none; try "layers.*"')
    return partial(apply_lora, rank=settings.rank, alpha=settings.alpha, patterns=settings.modules)


def _match(patterns: Collection[str], names: Collection[str]) -> bool:
    return any(fnmatchcase(name, pattern) for name in names for pattern in patterns)
