"""Which part of the model a job trains, checked against the names of the whole model."""

from __future__ import annotations

import logging
from fnmatch import fnmatchcase

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.start import Start
from torchtitan.job import Config
from torchtitan.lora.settings import LoRAConfig
from torchtitan.models.contract import LanguageModel
from torchtitan.models.lora import apply_lora, is_factor, linear_names
from torchtitan.models.trained import Trained, check_pattern
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.trajectory import Job

logger = logging.getLogger(__name__)


def find_trained(config: Config, *, model: LanguageModel) -> Trained:
    """Say which parameters are trained, and log how many that are where it is not all of them.

    `model` is the whole one, on the meta device; with [lora] it is given the factors.

    Raises:
        ConfigError: A pattern stands for nothing, or nothing is left to train.
    """
    lora = config.lora
    names = {name for name, _ in model.named_parameters()}
    unset = OptimizerConfig().no_decay_params  # which may match nothing: few models have a bias
    for pattern in config.optimizer.no_decay_params:
        if pattern not in unset:
            check_pattern(pattern, names, key="[optimizer] no_decay_params", what="parameter")
    trained = Trained(frozen=config.optimizer.frozen_params, factors_alone=lora.rank > 0)
    if trained == Trained():
        return trained
    if lora.rank:
        linears = linear_names(model)
        for pattern in lora.modules:
            check_pattern(pattern, linears, key="[lora] modules", what="linear layer")
        if not lora.modules:
            raise ConfigError('[lora] modules must name a layer, got none; try "layers.*"')
        if biased := [
            name
            for name in linears
            if any(fnmatchcase(name, pattern) for pattern in lora.modules)
            and f"{name}.bias" in names
        ]:
            raise ConfigError(
                f"[lora] modules must be linear layers without a bias, got {', '.join(biased[:4])}"
                f"{' ...' if len(biased) > 4 else ''}; name others"
            )
        apply_lora(model, rank=lora.rank, alpha=lora.alpha, patterns=lora.modules)
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    trained.check(sizes)
    logger.info(
        "Trained are %s of %s parameters",
        f"{sum(size for name, size in sizes.items() if trained.includes(name)):,}",
        f"{sum(sizes.values()):,}",
    )
    return trained


def warn_of_random_base(config: Config) -> None:
    """Warn where a run that starts from nothing trains adapters alone: what they adapt is noise."""
    if config.lora.rank:
        logger.warning(
            "lora.rank = %d trains adapters beside weights that are random and stay so, since the "
            "run starts from no checkpoint; name the base by checkpoint.initial_load_path (with "
            "checkpoint.enable = true)",
            config.lora.rank,
        )


def check_scale(start: Start, *, lora: LoRAConfig, group: dist.ProcessGroup) -> None:
    """Check that factors which begin a new run are scaled as they were trained.

    Where all of a run is taken its settings are compared as a whole.

    Raises:
        CheckpointError: They would make another model of the same weights.
    """
    if not lora.rank or start.intention != "finetune" or start.is_plain or start.hf is not None:
        return
    names = storage.stored_names(start.source, "model", group=group)
    taken = [
        name
        for name in names
        if is_factor(name) and not any(fnmatchcase(name, pattern) for pattern in start.exclude)
    ]
    if not taken:
        return
    manifest = storage.on_first_rank(lambda: storage.read_manifest(start.source), group=group)
    alpha = Job.stored(manifest["config"], file=manifest.path).config.lora.alpha
    if alpha != lora.alpha:
        raise CheckpointError(
            f"the low-rank factors of {start.source} must be scaled as they were trained, by "
            f"lora.alpha = {alpha:g}, got {lora.alpha:g}; write lora.alpha = {alpha:g}, or begin "
            f'with new factors: checkpoint.exclude_from_loading = ["*.lora_?"]'
        )
