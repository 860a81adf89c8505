"""Which model, over which ranks: found and checked before anything is built.

Nothing here needs a process group or a device, so `config` and `plan` use it on a laptop. Every
rank does the same, so that a mistake ends the job in its first second.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from torchtitan.base.custom import convert_errors
from torchtitan.base.errors import Mistakes
from torchtitan.checkpoint.settings import check_excluded
from torchtitan.checkpoint.state import VOCABULARY
from torchtitan.data.loader import accumulation_steps
from torchtitan.data.settings import OF_PAIRS
from torchtitan.job import Config
from torchtitan.mesh.dims import resolve_dims
from torchtitan.models.families import find_model
from torchtitan.models.interface import (
    Counts,
    LanguageModel,
    TrainableParams,
    count,
    count_multiplied,
)
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec, check_contract
from torchtitan.optim.loss import find_loss
from torchtitan.optim.optimizer import find_trainable
from torchtitan.optim.schedule import find_decay
from torchtitan.optim.settings import RouterConfig
from torchtitan.parallel.layout import Adapt, Layout, check_parallel, find_reshard

if TYPE_CHECKING:
    from torchtitan.parallel.pipeline.layout import PipelineLayout


def find_layout(config: Config, *, world_size: int) -> Layout:
    """Find model, degrees and stages; raise ConfigError that lists everything that does not fit
    together."""
    training, scheduler, mistakes = config.training, config.lr_scheduler, Mistakes()
    dims = reshard = pipeline = None
    with mistakes:
        dims = resolve_dims(config.parallelism, world_size=world_size)
    with mistakes:
        find_decay(scheduler.decay_type, scheduler.decay_options)
    with mistakes:
        if training.loss in OF_PAIRS:
            from torchtitan.finetune.preferences import find_function

            find_function(training.loss, training.loss_options)
        find_loss(training.loss, training.loss_options)
    with mistakes:
        spec, architecture = find_model(config.model)
        with convert_errors(config.model.name, key="model.name"):
            model = spec.build_meta(architecture)
            check_contract(model, spec=spec)
        counts = count(model)
        with mistakes:
            check_model(config, spec=spec, model=model)
        with mistakes:
            weights = count_multiplied(model)
            trained, adapt = _find_trained(config, spec=spec, model=model)
            num_frozen = sum(n for name, n in weights.items() if not trained.includes(name))
        if dims is not None:
            with mistakes:
                reshard = find_reshard(config.parallelism, dims=dims)
            with mistakes:
                frees_weights = reshard is not None and not reshard.keeps_last
                pipeline = _find_stages(
                    config, architecture, counts=counts, frees_weights=frees_weights
                )
    if dims is not None:
        with mistakes:
            accumulation = accumulation_steps(
                training.global_batch_size, local_batch_size=training.local_batch_size, dp=dims.dp
            )
    mistakes.report()
    assert dims is not None
    assert reshard is not None
    return Layout(
        spec=spec,
        architecture=architecture,
        counts=replace(counts, num_frozen=num_frozen),
        dims=dims,
        reshard=reshard,
        pipeline=pipeline,
        float8=config.quantize.linear.float8 if config.model.converters else None,
        accumulation=accumulation,
        trained=trained,
        adapt=adapt,
    )


def check_model(config: Config, *, spec: ModelSpec, model: LanguageModel) -> None:
    """Check that a family, at these sizes, can do what the job asks of it; raise ConfigError that
    lists what it cannot."""
    checkpoint, mistakes = config.checkpoint, Mistakes()
    with mistakes:
        check_parallel(
            model,
            spec=spec,
            parallelism=config.parallelism,
            recomputation=config.activation_checkpoint,
            compilation=config.compile,
            float8=config.quantize.linear.float8 if config.model.converters else None,
            attn_mask_type=config.training.attn_mask_type,
        )
    if config.router != RouterConfig():
        from torchtitan.optim.balance import check_balance

        with mistakes:
            check_balance(config.router, model=model)
    with mistakes:
        check_excluded(checkpoint.exclude_from_loading)
    keys = [k for k in ("initial_load_in_hf", "last_save_in_hf") if getattr(checkpoint, k)]
    if keys:
        from torchtitan.hf.model import check_names_and_sizes

        with mistakes:
            check_names_and_sizes(model, spec=spec, keys=keys)
    mistakes.report()


def _find_stages(
    config: Config, architecture: DecoderConfig, *, counts: Counts, frees_weights: bool
) -> PipelineLayout | None:
    """Plan the stages of the pipeline, if there is one."""
    if config.parallelism.pipeline_parallel_degree == 1:
        return None
    from torchtitan.parallel.pipeline.layout import plan_pipeline

    return plan_pipeline(
        config.parallelism,
        num_layers=architecture.num_layers,
        counts=counts,
        training=config.training,
        frees_weights=frees_weights,
        recomputation=config.activation_checkpoint.mode,
        compiles=config.compile.blocks,
    )


def _find_trained(
    config: Config, *, spec: ModelSpec, model: LanguageModel
) -> tuple[TrainableParams, Adapt | None]:
    """Return which parameters are trained, and what adds LoRA adapters; `model` gets them here."""
    adapt: Adapt | None = None
    only: tuple[str, ...] = ("*",)
    if config.lora.rank:
        from torchtitan.finetune.lora import ADAPTERS, apply_lora

        adapt = partial(apply_lora, settings=config.lora, names=spec.hf.names)
        only = ADAPTERS
        only += VOCABULARY if config.lora.train_embeddings else ()
        adapt(model)
    return find_trainable(model, settings=config.optimizer, only=only), adapt
