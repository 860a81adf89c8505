"""Which model, over which ranks: all that can be said before anything is built.

Degrees, sizes, stages and microbatches are checked against each other here, on every rank alike, so
that a mistake ends the job in its first second.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import asdict, dataclass, replace
from functools import partial

import torch

from torchtitan.assemble.trained import find_trained
from torchtitan.base.device import device_name
from torchtitan.base.errors import ConfigError, Mistakes, did_you_mean
from torchtitan.checkpoint.hf import find_misnamed
from torchtitan.config.toml_files import to_toml
from torchtitan.data.loader import accumulation_steps
from torchtitan.job import Config
from torchtitan.mesh.dims import ParallelDims, resolve_dims
from torchtitan.models.contract import Counts, LanguageModel, check_contract, count
from torchtitan.models.families import MODELS
from torchtitan.models.settings import ModelConfig, RopeScalingConfig
from torchtitan.models.spec import (
    DecoderConfig,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    RopeScaling,
    YarnScaling,
)
from torchtitan.models.trained import Trained
from torchtitan.parallel.compile import check_backend, check_compile
from torchtitan.parallel.context.build import check_attention
from torchtitan.parallel.float8 import check_float8, find_converted
from torchtitan.parallel.fsdp import find_reshard, name_reshard
from torchtitan.parallel.pipeline.layout import PipelineLayout, plan_pipeline
from torchtitan.parallel.tensor import check_tensor_parallel

logger = logging.getLogger(__name__)

SCALINGS: dict[type[RopeScaling], str] = {
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
}


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model and how it lies over the ranks."""

    spec: ModelSpec
    architecture: DecoderConfig
    counts: Counts
    dims: ParallelDims
    pipeline: PipelineLayout | None
    """Stages and schedule; None without pipeline parallelism."""
    accumulation: int
    """Microbatches of local_batch_size samples that a rank adds up in a step."""
    trained: Trained
    """Which parameters are trained."""


def find_layout(config: Config, *, world_size: int) -> Layout:
    """Find model, degrees and stages, and refuse what does not fit together.

    Raises:
        ConfigError: Says all that does not fit, and what would.
    """
    training, parallelism = config.training, config.parallelism
    mistakes = Mistakes()
    dims = mistakes.of(lambda: resolve_dims(parallelism, world_size=world_size))
    found = mistakes.of(lambda: find_model(config.model))
    mistakes.of(lambda: check_backend(config.compile, is_installed=False))
    if found is None:
        mistakes.report()
    assert found is not None
    spec, architecture = found
    model = spec.build_meta(architecture)
    check_contract(model, name=config.model.name)
    counts = count(model)
    mistakes.of(lambda: check_family(config, spec=spec, model=model))
    if dims is None:
        mistakes.report()
    assert dims is not None
    mistakes.of(lambda: find_reshard(parallelism, dims=dims))
    pipeline = mistakes.of(
        lambda: plan_pipeline(
            parallelism,
            num_layers=architecture.num_layers,
            counts=counts,
            training=training,
            frees_weights=name_reshard(parallelism, dims=dims) == "always",
            recomputes=config.activation_checkpoint.mode != "none",
            compiles=config.compile.enable,
        )
    )
    accumulation = mistakes.of(
        lambda: accumulation_steps(
            training.global_batch_size, local_batch_size=training.local_batch_size, dp=dims.dp
        )
    )
    trained = mistakes.of(lambda: find_trained(config, model=model))  # changes the model
    mistakes.report()
    assert accumulation is not None
    assert trained is not None
    return Layout(
        spec=spec,
        architecture=architecture,
        counts=counts,
        dims=dims,
        pipeline=pipeline,
        accumulation=accumulation,
        trained=trained,
    )


def check_device(config: Config, *, device_type: str) -> None:
    """Check that a machine with such devices has what the job computes with.

    Raises:
        ConfigError: A compiler, a package or the device's own ability is missing.
    """
    mistakes = Mistakes()
    mistakes.of(lambda: check_compile(config.compile, device_type=device_type))
    if config.model.converters:
        float8 = config.quantize.linear.float8
        mistakes.of(lambda: check_float8(float8, device_type=device_type))
    mistakes.report()


def check_family(config: Config, *, spec: ModelSpec, model: LanguageModel) -> None:
    """Check that the family knows how to do what the job asks of it, at its sizes.

    Raises:
        ConfigError: It cannot be split or cut as asked, or has no files of Hugging Face.
    """
    training, parallelism, checkpoint = config.training, config.parallelism, config.checkpoint
    mistakes = Mistakes()
    mistakes.of(
        lambda: check_tensor_parallel(
            model, plan=spec.tensor_plan, parallelism=parallelism, seq_len=training.seq_len
        )
    )
    mistakes.of(lambda: check_attention(model, parallelism=parallelism))
    if config.model.converters:
        mistakes.of(lambda: find_converted(model, settings=config.quantize.linear.float8))
    mistakes.of(lambda: _check_stages(spec, degree=parallelism.pipeline_parallel_degree))
    names = [name for name, _ in model.named_parameters()]
    for key in ("initial_load_in_hf", "last_save_in_hf"):
        if getattr(checkpoint, key):
            check = partial(check_hf, spec, names, of=model.config, key=f"[checkpoint] {key}")
            mistakes.of(check)
    mistakes.report()


def check_hf(spec: ModelSpec, names: Collection[str], *, of: DecoderConfig, key: str) -> None:
    """Check that the files of Hugging Face have a name for each of `names`, and for no others.

    Raises:
        ConfigError: There are no such files of the family, or a parameter has no place there.
    """
    if not spec.hf.names:
        raise ConfigError(
            f"{key} needs a model that Hugging Face has files of, and the ModelSpec of {spec.name} "
            f"has none (no hf); remove the setting"
        )
    misnamed = find_misnamed(names, names=spec.hf, num_layers=of.num_layers, tied=of.tie_embeddings)
    if misnamed is not None:
        raise ConfigError(
            f"{key}: the table of names of {spec.name} does not fit its module: {misnamed}; mend "
            f"the HFFormat of its ModelSpec, or remove the setting"
        )


def _check_stages(spec: ModelSpec, *, degree: int) -> None:
    if degree > 1 and not spec.stages:
        raise ConfigError(
            f"[parallelism] pipeline_parallel_degree must be 1 for {spec.name}, got {degree}: it "
            f"does not run in stages (its ModelSpec says stages = False)"
        )


def find_model(settings: ModelConfig) -> tuple[ModelSpec, DecoderConfig]:
    """Look up a model and its size, and set its rotary wavelengths.

    Raises:
        ConfigError: There is none of that name, it has no such size, or bounds are in disorder.
    """
    name, flavor = settings.name, settings.flavor
    if name not in MODELS:
        raise ConfigError(
            f"[model] name must be one of {', '.join(MODELS)}, got '{name}'"
            f"{did_you_mean(name, MODELS)}"
        )
    spec = MODELS[name]
    if flavor not in spec.flavors:
        raise ConfigError(
            f"[model] flavor of {name} must be one of {', '.join(spec.flavors)}, got '{flavor}'"
            f"{did_you_mean(flavor, spec.flavors)}"
        )
    architecture = spec.flavors[flavor]
    if settings.vocab_size is not None:
        architecture = replace(architecture, vocab_size=settings.vocab_size)
    if settings.rope_theta is not None:
        architecture = replace(architecture, rope_theta=settings.rope_theta)
    if settings.rope_scaling.type != "flavor":
        architecture = replace(architecture, rope_scaling=find_scaling(settings.rope_scaling))
    return spec, architecture


def find_scaling(settings: RopeScalingConfig) -> RopeScaling | None:
    """Say how wavelengths are scaled, what is not set by the defaults of that way.

    Raises:
        ConfigError: The bounds of long and short wavelengths are in disorder.
    """
    # the rules have seen to it that what is given is what the type reads
    given = {key: value for key, value in asdict(settings).items() if value is not None}
    match given.pop("type"):
        case "linear":
            return LinearScaling(**given)
        case "llama3":
            llama3 = Llama3Scaling(**given)
            _check_order(
                "low_freq_factor",
                llama3.low_freq_factor,
                "high_freq_factor",
                llama3.high_freq_factor,
            )
            return llama3
        case "yarn":
            yarn = YarnScaling(**given)
            _check_order("beta_slow", yarn.beta_slow, "beta_fast", yarn.beta_fast)
            return yarn
    return None


def _check_order(low_name: str, low: float, high_name: str, high: float) -> None:
    if low >= high:
        raise ConfigError(
            f"[model.rope_scaling] {high_name} must be greater than {low_name}, got {high:g} and "
            f"{low:g}; raise the first or lower the second"
        )


def describe_sequences(config: Config, *, layout: Layout) -> list[str]:
    """Say how sequences lie over ranks, hold documents and are stretched, where that matters."""
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
        said.append(f"rope scaling {SCALINGS[type(scaling)]}, factor {scaling.factor:g}")
    return said


def warn_of_positions(scaling: RopeScaling | None, *, seq_len: int) -> None:
    """Warn where sequences are longer than the rotation was stretched for."""
    if scaling is None or isinstance(scaling, LinearScaling):
        return
    reached = int(scaling.factor * scaling.original_max_position)
    if reached < seq_len:
        logger.warning(
            "The rope scaling reaches %d positions (factor %g x original_max_position %d), "
            "training.seq_len is %d; for as many raise model.rope_scaling.factor to %g",
            reached,
            scaling.factor,
            scaling.original_max_position,
            seq_len,
            seq_len / scaling.original_max_position,
        )


def log_job(
    config: Config, *, layout: Layout, device: torch.device, precision: str = "as set"
) -> None:
    """Say what is about to be trained, where, and how; `precision`: why it computes as it does."""
    dims = layout.dims
    seq_len = config.training.seq_len
    logger.info(
        "%s %s: %s parameters, %.3g FLOPs a token at seq_len %d",
        config.model.name,
        config.model.flavor,
        f"{layout.counts.num_parameters:,}",
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
    if config.model.converters:
        float8 = config.quantize.linear.float8
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
