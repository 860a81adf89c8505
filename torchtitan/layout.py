"""Which model, over which ranks: found and checked before anything is built.

Degrees, sizes, stages and microbatches are checked against each other, on every rank alike, so that
a mistake ends the job in its first second.

Which model a job names: a flavor, with sizes of its own, or a Hugging Face folder's.

Which part of the model a job trains, checked against the names of the whole model.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.device import device_name
from torchtitan.base.errors import CheckpointError, ConfigError, Mistakes, Violation, did_you_mean
from torchtitan.base.own import is_import_path, load_object, within
from torchtitan.base.patterns import check_pattern, matches
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.start import Start
from torchtitan.config.overrides import given_overrides
from torchtitan.config.toml_files import to_toml
from torchtitan.data.loader import accumulation_steps
from torchtitan.finetune.lora import ADAPTERS, Adapt, build_adapt, is_adapter
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.hf.config import architecture_of, check_family, family_of, find_unsaid, read_config
from torchtitan.hf.names import CONFIG, Names
from torchtitan.job import Config, own_sections
from torchtitan.mesh.dims import resolve_dims
from torchtitan.mesh.elastic import FULL_WORLD_SIZE, fit_ranks
from torchtitan.models.families import MODELS
from torchtitan.models.interface import (
    LanguageModel,
    TrainableParams,
    count,
    router_biases,
)
from torchtitan.models.rope import warn_beyond_rope
from torchtitan.models.settings import (
    ALL_SIZES,
    HF,
    ModelConfig,
    ModelSection,
    RopeScalingConfig,
)
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec, check_contract
from torchtitan.optim.balance import check_balance
from torchtitan.optim.loss import find_loss
from torchtitan.optim.optimizer import check_optimizer
from torchtitan.optim.schedule import find_decay
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.parallel.compile import check_backend
from torchtitan.parallel.context.attention import check_attention
from torchtitan.parallel.expert import check_expert_parallel
from torchtitan.parallel.float8 import check_float8, find_converted
from torchtitan.parallel.fsdp import find_reshard
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline.layout import plan_pipeline
from torchtitan.parallel.tensor import check_tensor_parallel
from torchtitan.resume_rules import CONFIG_FILE, Job

logger = logging.getLogger(__name__)


def fit_job(config: Config, *, world_size: int) -> Config:
    """Give a job that may lose nodes the degrees for those that are left.

    Raises:
        ConfigError: No layout that it allows fits them.
    """
    if FULL_WORLD_SIZE in os.environ and not config.checkpoint.enable:
        raise ConfigError.at(
            "checkpoint.enable",
            "must be true in a job that may lose nodes (--nnodes MIN:MAX): it resumes from its "
            "checkpoints",
        )
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
    mistakes.of(lambda: check_model(config, spec=spec, model=model))
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
    mistakes.of(lambda: check_backend(config.compile, is_installed=True))
    if (float8 := layout.float8) is not None:
        mistakes.of(lambda: check_float8(float8, device_type=device_type))
    mistakes.report()


def check_model(config: Config, *, spec: ModelSpec, model: LanguageModel) -> None:
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
    if training.attn_mask_type == "block_causal" or training.reset_positions:
        said.append(
            f"attention mask {training.attn_mask_type}, positions "
            f"{'restart in each document' if training.reset_positions else 'continue'}"
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
    warn_beyond_rope(layout.architecture.rope_scaling, seq_len=seq_len)
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


HUB_NAME = re.compile(r"\w[\w.-]*/[\w.-]+")


def find_model(settings: ModelConfig) -> tuple[ModelSpec, DecoderConfig]:
    """Look up a model and its flavor, and put the sizes that the job gives in their place.

    Raises:
        ConfigError: There is none of that name, it has no such flavor, or sizes do not fit.
    """
    spec = _find_spec(settings)
    given = given_overrides(settings, of=spec.sizes)
    if settings.flavor == HF:
        if missing := spec.sizes.missing(given):
            rule = (
                f'"hf" means the model of checkpoint.initial_load_path with initial_load_in_hf = '
                f"true, or sizes that are all given, and {', '.join(missing)} are not; name a "
                f"folder of Hugging Face, or a flavor: {', '.join(spec.flavors)}"
            )
            raise ConfigError.at(("model.flavor", "checkpoint.initial_load_in_hf"), rule)
        architecture = spec.sizes(**given, **spec.of_family)
    elif settings.flavor in spec.flavors:
        architecture = replace(spec.flavors[settings.flavor], **given)
    else:
        flavors = (*spec.flavors, HF)
        rule = (
            f"must be one of {', '.join(flavors)} for {spec.name}, got '{settings.flavor}'"
            f"{did_you_mean(settings.flavor, flavors)}"
        )
        if others := [name for name, other in MODELS.items() if settings.flavor in other.flavors]:
            rule += f"; it is a flavor of {' and '.join(others)}"
        raise ConfigError.at(("model.flavor", "model.name"), rule)
    if settings.rope_scaling.type != "flavor":
        architecture = replace(architecture, rope_scaling=settings.rope_scaling.build())
    given |= given_overrides(settings, of=ALL_SIZES)
    wrong = [*architecture.violations()]
    for key in sorted({*given, *architecture.given(of_family=False)}):
        if not _has_size(spec, key):
            having = [other.name for other in MODELS.values() if _has_size(other, key)]
            rule = f"is no size of {spec.name}; remove it, or take {' or '.join(having)}"
            wrong.append(Violation((key, "name"), rule))
    if wrong:
        raise ConfigError([_tell(one, given=given, settings=settings) for one in wrong])
    return spec, architecture


def describe_model(settings: ModelConfig, *, spec: ModelSpec) -> str:
    """Name the flavor, and the sizes that take the place of its own."""
    given = given_overrides(settings, of=spec.sizes)
    sizes = ", ".join(f"{name} {value}" for name, value in given.items())
    return f"{settings.flavor} ({sizes})" if sizes else settings.flavor


def resolve_model(config: Config) -> Config:
    """Give the settings of a job with the model of a Hugging Face folder its family and sizes.

    They are stored with the run, which has no more need of the folder: where it is gone, they are
    those of the run so far.

    Raises:
        UserError: The folder is not there, or of a model that is not built here.
    """
    model, run = config.model, Path(config.job.dump_folder) / CONFIG_FILE
    path = config.checkpoint.initial_load_path
    if model.flavor != HF or not config.checkpoint.initial_load_in_hf:
        return config
    kind = ALL_SIZES if model.name == HF else _find_spec(model).sizes
    sizes = given_overrides(model, of=kind)
    if model.name != HF and not kind.missing(sizes):
        return config
    assert path is not None, "initial_load_in_hf needs initial_load_path"
    if not (Path(path) / CONFIG).is_file() and run.is_file():
        found = Job.stored_in(run).config.model
    else:
        if not Path(path).is_dir():
            raise not_there(path)
        theirs = read_config(Path(path))
        if model.name == HF:
            spec = family_of(theirs, models=MODELS)
        else:
            spec = _find_spec(model)
            check_family(theirs, format=spec.hf)
        found = describe(spec, architecture_of(theirs, spec=spec))
    scaling = model.rope_scaling if model.rope_scaling.type != "flavor" else found.rope_scaling
    sizes = {**given_overrides(found, of=kind), **sizes}
    return replace(config, model=replace(model, name=found.name, rope_scaling=scaling, **sizes))


def not_there(path: str) -> ConfigError:
    """Return the error of a folder of Hugging Face that is not there, perhaps a name on its Hub."""
    remedy = "name a folder of Hugging Face: config.json and safetensors files"
    if HUB_NAME.fullmatch(path) and not Path(path).parent.exists():
        remedy = (
            f'nothing is downloaded here: fetch it with "hf download {path} --local-dir DIR", and '
            f"name DIR"
        )
    rule = f"there is no folder {path}; {remedy}"
    return ConfigError.at("checkpoint.initial_load_path", rule)


def describe(spec: ModelSpec, architecture: DecoderConfig) -> ModelConfig:
    """Return the settings of a model, whether or not a flavor has its sizes."""
    return ModelSection(
        name=spec.name,
        flavor=HF,
        rope_scaling=RopeScalingConfig.of(architecture.rope_scaling),
        **architecture.given(of_family=False),
    )


def _find_spec(settings: ModelConfig) -> ModelSpec:
    if (name := settings.name) in MODELS:
        return MODELS[name]
    if name == HF:
        rule = (
            f'"hf" needs flavor = "hf" and checkpoint.initial_load_in_hf; write both, or one of '
            f"{', '.join(MODELS)}"
        )
        raise ConfigError.at(("model.name", "model.flavor"), rule)
    if is_import_path(name):
        spec = load_object(name, key="model.name")
        if isinstance(spec, ModelSpec) and spec.flavors:
            return spec
        raise ConfigError.at(
            "model.name",
            f"must name a torchtitan.models.spec.ModelSpec with a flavor, got '{name}', which is "
            f"{spec!r:.80}",
        )
    rule = (
        f"must be one of {', '.join(MODELS)}, or the import path of a ModelSpec as "
        f"my_package.my_model:SPEC, got '{name}'{did_you_mean(name, MODELS)}"
    )
    raise ConfigError.at("model.name", rule)


def _tell(violation: Violation, *, given: Mapping[str, Any], settings: ModelConfig) -> Violation:
    """Add which of the sizes are the flavor's."""
    others = [key for key in violation.keys if key not in (*given, "head_dim", "name")]
    rule = violation.rule
    if others:
        rule += f" ({' and '.join(others)} as in flavor {settings.flavor})"
    return replace(violation, rule=rule).within("model")


def _has_size(spec: ModelSpec, key: str) -> bool:
    """Tell whether a family has a size; a window it also has without files of Hugging Face."""
    if key != "window":
        return any(one.name == key for one in fields(spec.sizes))
    return not spec.hf.names or any(ours == "window" for ours, _ in spec.hf.more_counts.values())


def find_trained(config: Config, *, model: LanguageModel) -> tuple[TrainableParams, Adapt | None]:
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
    trained = TrainableParams(frozen=config.optimizer.frozen_params)
    adapt = build_adapt(config.lora, model=model)
    if adapt is not None:
        adapt(model)
        trained = replace(trained, only=ADAPTERS)
    if trained != TrainableParams():
        sizes = {name: p.numel() for name, p in model.named_parameters()}
        state = set(router_biases(model))
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
    if not lora.rank or start.mode != "finetune" or not isinstance(source, Checkpoint):
        return
    if not any(is_adapter(name) and not matches(name, start.exclude) for name in source.names()):
        return
    manifest = source.manifest
    alpha = Job.stored(manifest["config"], file=manifest.path).config.lora.alpha
    if alpha != lora.alpha:
        raise CheckpointError(
            f"the adapters of {source.path} must be scaled as they were trained, by "
            f"lora.alpha = {alpha:g}, got {lora.alpha:g}; write lora.alpha = {alpha:g}, or begin "
            f'with new adapters: checkpoint.exclude_from_loading = ["*.lora_?"]'
        )
