"""Which model, over which ranks: found and checked before anything is built.

Degrees, sizes, stages and microbatches are checked against each other, on every rank alike, so that
a mistake ends the job in its first second.
"""

from __future__ import annotations

import logging
import os
from dataclasses import replace

import torch

from torchtitan.assemble.model import describe_model, find_model
from torchtitan.assemble.trained import find_trained
from torchtitan.base.device import device_name
from torchtitan.base.errors import ConfigError, Mistakes
from torchtitan.base.own import within
from torchtitan.config.toml_files import to_toml
from torchtitan.data.loader import accumulation_steps
from torchtitan.hf.config import find_unsaid
from torchtitan.hf.names import Names
from torchtitan.job import Config
from torchtitan.mesh.dims import resolve_dims
from torchtitan.mesh.elastic import fit_ranks
from torchtitan.models.contract import LanguageModel, check_contract, count
from torchtitan.models.rope_scaling import warn_of_positions
from torchtitan.models.spec import ModelSpec
from torchtitan.optim.balance import check_balance
from torchtitan.optim.loss import find_loss
from torchtitan.optim.schedule import find_decay
from torchtitan.parallel.compile import check_backend, check_compile
from torchtitan.parallel.context.build import check_attention
from torchtitan.parallel.expert import check_expert_parallel
from torchtitan.parallel.float8 import check_float8, find_converted
from torchtitan.parallel.fsdp import find_reshard
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline.layout import plan_pipeline
from torchtitan.parallel.tensor import check_tensor_parallel

logger = logging.getLogger(__name__)


def fit_job(config: Config, *, world_size: int) -> Config:
    """Give a job that may lose nodes the degrees for those that are left.

    Raises:
        ConfigError: No layout that it allows fits them.
    """
    parallelism, training = fit_ranks(
        config.parallelism,
        config.training,
        settings=config.elastic,
        world_size=world_size,
        environ=os.environ,
    )
    return replace(config, parallelism=parallelism, training=training)


def find_layout(config: Config, *, world_size: int) -> Layout:
    """Find model, degrees and stages, and refuse what does not fit together.

    Raises:
        ConfigError: Names everything that does not fit, and what would.
    """
    training, parallelism = config.training, config.parallelism
    mistakes = Mistakes()
    dims = mistakes.of(lambda: resolve_dims(parallelism, world_size=world_size))
    found = mistakes.of(lambda: find_model(config.model))
    mistakes.of(lambda: check_backend(config.compile, is_installed=False))
    mistakes.of(lambda: find_decay(config.lr_scheduler.decay_type))
    mistakes.of(lambda: find_loss(training.loss))
    if found is None:
        mistakes.report()
    assert found is not None
    spec, architecture = found
    with within(config.model.name, key="model.name"):
        model = spec.build_meta(architecture)
        check_contract(model, spec=spec)
    counts = count(model)
    mistakes.of(lambda: check_family(config, spec=spec, model=model))
    if dims is None:
        mistakes.report()
    assert dims is not None
    reshard = mistakes.of(lambda: find_reshard(parallelism, dims=dims))
    pipeline = mistakes.of(
        lambda: plan_pipeline(
            parallelism,
            num_layers=architecture.num_layers,
            counts=counts,
            training=training,
            frees_weights=reshard is not None and not reshard.keeps_last,
            recomputes=config.activation_checkpoint.mode != "none",
            compiles=config.compile.enable,
        )
    )
    accumulation = mistakes.of(
        lambda: accumulation_steps(
            training.global_batch_size, local_batch_size=training.local_batch_size, dp=dims.dp
        )
    )
    found_trained = mistakes.of(lambda: find_trained(config, model=model))  # adapts the model
    mistakes.report()
    assert reshard is not None
    assert accumulation is not None
    assert found_trained is not None
    trained, adapt = found_trained
    return Layout(
        spec=spec,
        architecture=architecture,
        counts=counts,
        dims=dims,
        reshard=reshard,
        pipeline=pipeline,
        float8=config.quantize.linear.float8 if config.model.converters else None,
        accumulation=accumulation,
        trained=trained,
        adapt=adapt,
    )


def check_device(config: Config, *, layout: Layout, device_type: str) -> None:
    """Check that a machine with such devices has what the job computes with."""
    mistakes = Mistakes()
    mistakes.of(lambda: check_compile(config.compile, device_type=device_type))
    if (float8 := layout.float8) is not None:
        mistakes.of(lambda: check_float8(float8, device_type=device_type))
    mistakes.report()


def check_family(config: Config, *, spec: ModelSpec, model: LanguageModel) -> None:
    """Check that the family knows how to do what the job asks of it, at its sizes."""
    parallelism, checkpoint = config.parallelism, config.checkpoint
    mistakes = Mistakes()
    mistakes.of(
        lambda: check_tensor_parallel(model, plan=spec.tensor_plan, parallelism=parallelism)
    )
    mistakes.of(lambda: check_expert_parallel(model, parallelism=parallelism))
    mistakes.of(lambda: check_balance(config.router, model=model))
    mistakes.of(lambda: check_attention(model, parallelism=parallelism))
    if config.model.converters:
        mistakes.of(lambda: find_converted(model, settings=config.quantize.linear.float8))
    mistakes.of(lambda: _check_stages(spec, degree=parallelism.pipeline_parallel_degree))
    names = {name for name, _ in model.named_parameters()}
    misnamed = Names(spec.hf, model.config).find_misnamed(names)
    unsaid = None if misnamed else find_unsaid(model.config, spec.hf)
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        if unsaid is not None and getattr(checkpoint, key):
            mistakes.add(
                f"checkpoint.{key}",
                f"needs sizes that Hugging Face's files can say: {unsaid}; change them in [model], "
                f"take another family, or remove this",
            )
        if misnamed is not None and getattr(checkpoint, key):
            mistakes.add(
                f"checkpoint.{key}",
                f"needs the names that Hugging Face gives the parameters, and the ModelSpec of "
                f"{spec.name} lacks some: {misnamed}; mend its hf, or remove this",
            )
    mistakes.report()


def _check_stages(spec: ModelSpec, *, degree: int) -> None:
    if degree > 1 and not spec.stages:
        raise ConfigError.at(
            "parallelism.pipeline_parallel_degree",
            f"must be 1 for {spec.name}, got {degree}: it does not run in stages (its ModelSpec "
            f"says stages = False)",
        )


def describe_sequences(config: Config, *, layout: Layout) -> list[str]:
    """Say how sequences are split over ranks, hold documents and are stretched, if at all."""
    training, parallelism = config.training, config.parallelism
    said = []
    if layout.dims.cp > 1:
        said.append(
            f"context parallel by {parallelism.context_parallel_rotate_method}, "
            f"load balancer {parallelism.context_parallel_load_balancer}"
        )
    if training.document_attention != "across" or training.document_positions != "continue":
        said.append(
            f"document attention {training.document_attention}, "
            f"document positions {training.document_positions}"
        )
    if (scaling := layout.architecture.rope_scaling) is not None:
        said.append(f"rope scaling {scaling.type}, factor {scaling.factor:g}")
    return said


def log_job(
    config: Config, *, layout: Layout, device: torch.device, precision: str = "as set"
) -> None:
    """Log what is about to be trained, where and how; `precision`: why it computes in that type."""
    dims = layout.dims
    seq_len = config.training.seq_len
    logger.info(
        "%s %s: %s parameters%s, %.3g FLOPs per token at seq_len %d",
        config.model.name,
        describe_model(config.model, spec=layout.spec),
        f"{layout.counts.num_parameters:,}",
        f" ({layout.counts.num_active:,} active)" if layout.counts.num_idle else "",
        layout.counts.flops_per_token(seq_len),
        seq_len,
    )
    logger.info(
        "%d x %s, layout: %s, computing in %s (%s) from %s weights",
        dims.world_size,
        device_name(device),
        dims,
        config.training.mixed_precision_param,
        precision,
        config.training.dtype,
    )
    warn_of_positions(layout.architecture.rope_scaling, seq_len=seq_len)
    if sequences := describe_sequences(config, layout=layout):
        logger.info("Sequences: %s", "; ".join(sequences))
    if (float8 := layout.float8) is not None:
        logger.info(
            "Linear layers of blocks multiply in float8 (%s%s); MFU is still of bfloat16's peak",
            float8.recipe_name or "tensorwise",
            ", emulated" if float8.emulate else "",
        )
    if config.compile.enable:
        logger.info(
            "Blocks are compiled by %s: the first step takes longer", config.compile.backend
        )
    if config.job.print_config:
        logger.info("Settings:\n%s", to_toml(config))
