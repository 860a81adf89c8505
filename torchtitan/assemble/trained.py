"""Which part of the model a job trains, checked against the names of the whole model."""

from __future__ import annotations

import logging
from dataclasses import replace
from fnmatch import fnmatchcase

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.source import Step
from torchtitan.checkpoint.start import Start
from torchtitan.job import Config
from torchtitan.lora.build import Adapt, build_adapt
from torchtitan.lora.layer import ADAPTERS, is_adapter
from torchtitan.lora.settings import LoRAConfig
from torchtitan.models.contract import LanguageModel
from torchtitan.models.routing import untrained
from torchtitan.models.trained import Trained, check_pattern
from torchtitan.optim.optimizer import check_optimizer
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.own import own_sections
from torchtitan.trajectory import Job

logger = logging.getLogger(__name__)


def find_trained(config: Config, *, model: LanguageModel) -> tuple[Trained, Adapt | None]:
    """Say which parameters are trained and what adds adapters; log how many if it is not all.

    `model` is the whole one, on the meta device; with [lora] it is given its adapters.

    Raises:
        ConfigError: A pattern matches nothing, or nothing is left to train.
    """
    names = {name for name, _ in model.named_parameters()}
    unset = OptimizerConfig().no_decay_params  # which may match nothing: few models have a bias
    for pattern in config.optimizer.no_decay_params:
        if pattern not in unset:
            check_pattern(pattern, names, key="optimizer.no_decay_params", what="parameter")
    trained = Trained(frozen=config.optimizer.frozen_params)
    adapt = build_adapt(config.lora, model=model)
    if adapt is not None:
        adapt(model)
        trained = replace(trained, only=ADAPTERS)
    if trained != Trained():
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        state = set(untrained(model))
        trained.check(sizes, no_weights={n for n, p in model.named_parameters() if p in state})
        logger.info(
            "Trained are %s of %s parameters",
            f"{sum(size for name, size in sizes.items() if trained.includes(name)):,}",
            f"{sum(sizes.values()):,}",
        )
    check_optimizer(
        config.optimizer,
        trained={
            name: p
            for name, p in model.named_parameters()
            if trained.includes(name) and p.requires_grad
        },
        sections=own_sections(config),
    )
    return trained, adapt


def warn_of_random_base(config: Config) -> None:
    """Warn if a run from scratch trains only adapters: the weights beside them are noise."""
    if config.lora.rank:
        logger.warning(
            "lora.rank = %d trains adapters beside weights that are random and stay so, since the "
            "run starts from no checkpoint; name the base by checkpoint.initial_load_path (with "
            "checkpoint.enable = true)",
            config.lora.rank,
        )


def check_scale(start: Start, *, lora: LoRAConfig) -> None:
    """Check that adapters from which a new run starts are scaled as they were trained.

    A run that is resumed as a whole has its settings compared as a whole.
    """
    source = start.source
    if not lora.rank or start.intention != "finetune" or not isinstance(source, Step):
        return
    taken = [
        name
        for name in source.names()
        if is_adapter(name) and not any(fnmatchcase(name, pattern) for pattern in start.exclude)
    ]
    if not taken:
        return
    manifest = source.manifest
    alpha = Job.stored(manifest["config"], file=manifest.path).config.lora.alpha
    if alpha != lora.alpha:
        raise CheckpointError(
            f"the adapters of {source.path} must be scaled as they were trained, by "
            f"lora.alpha = {alpha:g}, got {lora.alpha:g}; write lora.alpha = {alpha:g}, or begin "
            f'with new adapters: checkpoint.exclude_from_loading = ["*.lora_?"]'
        )
