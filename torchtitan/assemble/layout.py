"""Which model, over which ranks: all that can be said before anything is built.

Degrees, sizes, stages and microbatches are checked against each other here, on every rank alike, so
that a mistake ends the job in its first second.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

import torch

from torchtitan.base.device import device_name, device_type
from torchtitan.base.errors import ConfigError
from torchtitan.config.load import to_toml
from torchtitan.config.schema import Config
from torchtitan.data.loader import accumulation_steps
from torchtitan.mesh.dims import ParallelDims, resolve_dims
from torchtitan.models import MODELS
from torchtitan.models.spec import DecoderConfig, ModelSpec, flops_per_token, num_parameters
from torchtitan.parallel.compile import check_compile
from torchtitan.parallel.context import check_heads
from torchtitan.parallel.pipeline_layout import PipelineLayout, plan_pipeline
from torchtitan.parallel.tensor import check_tensor_parallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model and how it lies over the ranks."""

    spec: ModelSpec
    architecture: DecoderConfig
    dims: ParallelDims
    pipeline: PipelineLayout | None
    """Stages and schedule; None without pipeline parallelism."""
    accumulation: int
    """Microbatches of local_batch_size samples that a rank adds up in a step."""


def find_layout(config: Config, *, world_size: int) -> Layout:
    """Find model, degrees and stages, and refuse what does not fit together.

    Raises:
        ConfigError: Says what does not fit, and what would.
    """
    training, parallelism = config.training, config.parallelism
    dims = resolve_dims(parallelism, world_size=world_size)
    spec, architecture = find_model(config.model.name, flavor=config.model.flavor)
    check_tensor_parallel(architecture, parallelism=parallelism, seq_len=training.seq_len)
    check_heads(architecture, parallelism=parallelism)
    check_compile(config.compile, device_type=device_type())
    return Layout(
        spec=spec,
        architecture=architecture,
        dims=dims,
        pipeline=plan_pipeline(
            parallelism,
            architecture=architecture,
            training=training,
            recomputes=config.activation_checkpoint.mode != "none",
            compiles=config.compile.enable,
        ),
        accumulation=accumulation_steps(
            training.global_batch_size, local_batch_size=training.local_batch_size, dp=dims.dp
        ),
    )


def find_model(name: str, *, flavor: str) -> tuple[ModelSpec, DecoderConfig]:
    """Look up a model and its size.

    Raises:
        ConfigError: There is none of that name, or it has no such size.
    """
    if name not in MODELS:
        raise ConfigError(f"[model] name must be one of {', '.join(MODELS)}, got '{name}'")
    spec = MODELS[name]
    if flavor not in spec.flavors:
        raise ConfigError(
            f"[model] flavor of {name} must be one of {', '.join(spec.flavors)}, got '{flavor}'"
        )
    return spec, spec.flavors[flavor]


def log_job(config: Config, *, layout: Layout, device: torch.device) -> None:
    """Say what is about to be trained, where, and how."""
    architecture, dims = layout.architecture, layout.dims
    seq_len = config.training.seq_len
    logger.info(
        "%s %s: %s parameters, %.3g FLOPs a token at seq_len %d",
        config.model.name,
        config.model.flavor,
        f"{num_parameters(architecture):,}",
        flops_per_token(architecture, seq_len),
        seq_len,
    )
    logger.info(
        "%d x %s, layout: %s, computing in %s",
        dims.world_size,
        device_name(device),
        dims,
        config.training.mixed_precision_param,
    )
    if config.compile.enable:
        logger.info(
            "Blocks are compiled by %s: the first step takes longer", config.compile.backend
        )
    if config.job.print_config:
        logger.info("Settings:\n%s", to_toml(config))
