"""Which part of the model a job trains, checked against the names of the whole model."""

from __future__ import annotations

import logging

import torch

from torchtitan.base.errors import ConfigError
from torchtitan.config.schema import Config
from torchtitan.models.lora import apply_lora, linear_names
from torchtitan.models.spec import DecoderConfig, ModelSpec
from torchtitan.models.trained import Trained, check_pattern

logger = logging.getLogger(__name__)


def find_trained(config: Config, *, spec: ModelSpec, architecture: DecoderConfig) -> Trained:
    """Say which parameters are trained, and log how many that are where it is not all of them.

    Raises:
        ConfigError: A pattern stands for nothing, or nothing is left to train.
    """
    lora = config.lora
    trained = Trained(frozen=config.optimizer.frozen_params, factors_alone=lora.rank > 0)
    if trained == Trained():
        return trained
    with torch.device("meta"):
        model = spec.build(architecture)
    if lora.rank:
        linears = linear_names(model)
        for pattern in lora.modules:
            check_pattern(pattern, linears, key="[lora] modules", what="linear layer")
        if not lora.modules:
            raise ConfigError('[lora] modules must name a layer, got none; try "layers.*"')
        apply_lora(model, rank=lora.rank, alpha=lora.alpha, patterns=lora.modules)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained.check(sizes)
    logger.info(
        "Trained are %s of %s parameters",
        f"{sum(size for name, size in sizes.items() if trained.includes(name)):,}",
        f"{sum(sizes.values()):,}",
    )
    return trained
