"""Everything that the trainer holds, built in order.

    layout -> checkpoint to start from -> mesh -> data -> model (meta) -> parallelize -> initial
    weights -> validation -> optimizer -> load -> number of steps -> metrics -> schedule

A mistake in a setting or a file fails here, before the first long work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

import torchtitan
from torchtitan.base.determinism import set_determinism
from torchtitan.base.device import device_name, device_type, local_device
from torchtitan.base.errors import ConfigError
from torchtitan.base.files import Once
from torchtitan.base.log import plural
from torchtitan.callbacks import CallbackRunner, build_callbacks
from torchtitan.checkpoint.lock import lock_folder
from torchtitan.checkpoint.state import Progress, RunState
from torchtitan.config.settings import to_toml
from torchtitan.data.dataset import build_samples, check_fills_batch
from torchtitan.data.loader import Loader, MapSamples, plan_steps
from torchtitan.data.sampler import SkippedSamples
from torchtitan.data.settings import OF_PAIRS, SUPERVISED, TrainingConfig
from torchtitan.data.tokenizer import build_tokenizer, check_vocabulary
from torchtitan.job import CONFIG_FILE, Config, JobConfig, write_config
from torchtitan.layout import find_layout
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.mesh.ranks import (
    OncePerMachine,
    RankInfo,
    check_data_alike,
    on_first_rank,
    set_timeout,
)
from torchtitan.metrics.events import EventLog, Hardware
from torchtitan.metrics.meter import build_meter
from torchtitan.metrics.sinks import build_sinks
from torchtitan.models.families import describe_model, find_model
from torchtitan.models.interface import HeadLoss, LanguageModel, ModelParts
from torchtitan.models.settings import TRANSFORMERS
from torchtitan.optim.loss import build_loss, find_loss
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import build_schedule
from torchtitan.parallel.context.shard import build_shard
from torchtitan.parallel.execution import Execution
from torchtitan.parallel.layout import Layout, check_device
from torchtitan.parallel.parallelize import build_model_and_execution, materialize
from torchtitan.parallel.precision import resolve_precision
from torchtitan.trainer import Run

if TYPE_CHECKING:
    from torchtitan.checkpoint.manager import CheckpointIO, CheckpointManager, Export
    from torchtitan.checkpoint.start import Start
    from torchtitan.hf.export import HFExport
    from torchtitan.metrics.trace import Recorder
    from torchtitan.optim.balance import Balance
    from torchtitan.validate import Validator

logger = logging.getLogger(__name__)


def build_run(
    config: Config,
    *,
    launch: RankInfo,
    color: bool,
    cleanup: ExitStack,
    callbacks: Sequence[object] = (),
) -> Run:
    """Build a run, resumed where there is a checkpoint. The process group must exist.

    `cleanup` receives callbacks that unlock the folder and restore torch's kernels; `callbacks` are
    those beside the settings'. Raises UserError if degrees, sizes, files or a checkpoint do not fit
    this job.
    """
    config, layout, precision = resolve_job(config, world_size=launch.world_size)
    folder = Path(config.job.dump_folder)
    callbacks = [*build_callbacks(config.training.callbacks), *callbacks]
    io = None
    if config.checkpoint.enable or config.checkpoint.initial_load_path is not None:
        from torchtitan.checkpoint.manager import open_io

        io = open_io(config.checkpoint, run_folder=folder, device_type=device_type())
    set_determinism(  # before anything runs on the device, and before custom data
        seed=config.debug.seed,
        deterministic=config.debug.deterministic,
        warn_only=config.debug.deterministic_warn_only,
        device_type=device_type(),
        environ=os.environ,
    )
    lock_folder(folder, cleanup=cleanup)
    start = choose_start(config, layout=layout, io=io)

    device = local_device(launch.local_rank)
    if device.type == "cuda" or config.training.attention_kernel != "auto":
        from torchtitan.models.kernels import set_attention_kernel

        set_attention_kernel(config.training.attention_kernel, device=device, cleanup=cleanup)
    log_job(config, layout=layout, device=device, precision=precision)
    mesh = build_mesh(layout.dims, device_type=device.type)
    set_timeout(config.comm.init_timeout_seconds, groups=mesh.groups())
    progress = Progress()
    loss = build_head_loss(config, layout=layout, mesh=mesh, device=device)
    samples = build_training_samples(config, layout=layout, once=OncePerMachine())
    loader = build_loader(config, samples=samples, layout=layout, mesh=mesh)
    preferences = None
    if config.training.loss in OF_PAIRS:
        from torchtitan.finetune.preferences import PreferenceLoss

        assert isinstance(loss, PreferenceLoss)
        preferences = loss
    model, execution = build_model(config, layout=layout, mesh=mesh, device=device, loss=loss)
    shard = build_shard(config.parallelism, training=config.training, mesh=mesh)
    events = EventLog(folder) if launch.rank == 0 else None
    balance = balance_experts(config, layout=layout, model=model, mesh=mesh, device=device)
    spikes = validator = None
    if config.spikes.action != "none":
        from torchtitan.optim.spikes import SpikeDetector

        spikes = SpikeDetector(
            config.spikes,
            equal_ranks=mesh.dims.tp,
            device=device,
            on_spike=None if events is None else events.spike,
        )
    if config.validation.enable:
        from torchtitan.validate import build_validator

        validator = build_validator(
            config.validation,
            training=config.training,
            tokenizer_path=config.model.tokenizer_path,
            samples_per_step=layout.samples_per_step(config.training),
            comm=config.comm,
            before_saves=config.checkpoint.enable and config.checkpoint.keep_best > 0,
            execution=execution,
            shard=shard,
            model=model,
            mesh=mesh,
            device=device,
            loss=preferences,
        )
    compared = {"preferences.training": samples}
    if validator is not None:
        compared["preferences.validation"] = validator.samples
    references = {} if preferences is None else preferences.find_references(compared)
    state = RunState(
        model=model,
        optimizer=build_optimizer(
            model,
            settings=config.optimizer,
            dtype=getattr(torch, config.training.mixed_precision_param),
        ),
        lr_settings={},  # of the planned steps, below
        loader=loader,
        progress=progress,
        more=references
        | {n: t for part in (balance, spikes) if part for n, t in part.state().items()},
    )
    if start is not None:
        from torchtitan.checkpoint.restore import restore

        assert io is not None, "a run without checkpoints starts from none"
        restore(state, start=start, group=io.group)
    training = plan_training(config, layout=layout, loader=loader, step=progress.step)
    lr_settings = {
        "peak_lr": config.optimizer.lr,
        "training_steps": training.steps,
        **asdict(config.lr_scheduler),
    }
    state = replace(state, lr_settings=lr_settings)
    execution.after_update()  # a checkpoint may have changed the weights
    if preferences is not None:
        from torchtitan.validate import evaluate_once

        preferences.compute_references(
            step=progress.step,
            evaluate=partial(
                evaluate_once,
                local_batch_size=config.training.local_batch_size,
                model=model,
                execution=execution,
                shard=shard,
                mesh=mesh,
                device=device,
            ),
        )
    is_chat = config.training.dataset in SUPERVISED
    if is_chat and config.lora.rank and start and not config.lora.train_embeddings:
        from torchtitan.finetune.lora import check_special_rows

        tokenizer = build_tokenizer(config.model.tokenizer_path)
        check_special_rows(model, samples=samples, special_tokens=tokenizer.special_tokens)
    on_first_rank(partial(write_config, config), group=dist.group.WORLD)
    checkpoints = build_checkpoints(
        config,
        layout=layout,
        state=state,
        last_step=training.steps,
        io=io,
        validator=validator,
        events=events,
    )
    sinks = build_sinks(
        config.metrics,
        folder=folder,
        rank=launch.rank,
        resume_step=progress.step,
        last_step=training.steps,
        color=color,
        job_config=asdict(config),
        description=config.job.description,
    )
    if events is not None:
        events.write(
            "start",
            step=progress.step,
            last_step=training.steps,
            config=to_toml(config),
            layout=str(layout.dims),
            loaded=None if start is None else str(start.source.path),
            versions={"torchtitan": torchtitan.__version__, "torch": torch.__version__},
            **asdict(
                Hardware(
                    resumed_from=progress.step,
                    world_size=launch.world_size,
                    ranks_per_machine=int(os.environ.get("LOCAL_WORLD_SIZE", launch.world_size)),
                    device=device_name(device),
                )
            ),
        )
    recorders, profiling = list["Recorder"](), config.profiling
    if profiling.enable_profiling or profiling.enable_memory_snapshot:
        from torchtitan.metrics.trace import build_recorders

        recorders = build_recorders(
            profiling, folder=folder, rank=launch.rank, device=device, step=progress.step
        )
    return Run(
        folder=folder,
        device=device,
        mesh=mesh,
        model=model,
        execution=execution,
        sequence_shard=shard,
        optimizer=state.optimizer,
        balance=balance,
        loss=preferences,
        schedule=build_schedule(
            config.lr_scheduler, peak_lr=config.optimizer.lr, training_steps=training.steps
        ),
        spikes=spikes,
        loader=loader,
        progress=progress,
        checkpoints=checkpoints,
        validator=validator,
        meter=build_meter(
            flops_per_token=layout.counts.flops_per_token(training.seq_len),
            dtype=getattr(torch, training.mixed_precision_param),
            world_size=launch.world_size,
            device=device,
        ),
        sinks=sinks,
        recorders=recorders,
        hooks=CallbackRunner(callbacks, device=device),
        events=events,
        training=training,
        tokens_per_step=layout.samples_per_step(training) * training.seq_len,
        log_freq=config.metrics.log_freq,
        train_timeout_seconds=config.comm.train_timeout_seconds,
    )


def resolve_job(config: Config, *, world_size: int) -> tuple[Config, Layout, str]:
    """Return the settings as they hold on these ranks, the layout, and why the dtype was chosen.

    Collective.
    """
    if config.checkpoint.initial_load_in_hf or config.model.name == TRANSFORMERS:
        from torchtitan.resume_rules import resolve_model

        config = resolve_model(config)
    layout = find_layout(config, world_size=world_size)
    check_device(config.compile, float8=layout.float8, device_type=device_type())
    uses_float8 = layout.float8 is not None
    training, precision = resolve_precision(
        config.training, uses_float8=uses_float8, device_type=device_type()
    )
    return replace(config, training=training), layout, precision


# -- which checkpoint --------------------------------------------------------------------------


def choose_start(config: Config, *, layout: Layout, io: CheckpointIO | None) -> Start | None:
    """Return what the run starts from, or None for the initial weights. Collective."""
    start, folder = None, Path(config.job.dump_folder)
    # without checkpoints, the job is only compared with the one whose results the folder has
    if io is not None or on_first_rank((folder / CONFIG_FILE).is_file, group=dist.group.WORLD):
        from torchtitan.checkpoint.start import find_start
        from torchtitan.finetune.lora import is_adapter
        from torchtitan.hf.source import open_initial
        from torchtitan.resume_rules import Job, compare_with_checkpoint, compare_with_results

        now = Job(config=config, dp=layout.dims.dp)
        start = find_start(
            config.checkpoint,
            run_folder=folder,
            io=io,
            compare=partial(compare_with_checkpoint, now=now),
            compare_results=partial(compare_with_results, now),
            open_initial=partial(
                open_initial,
                settings=config.checkpoint,
                model=config.model,
                spec=layout.spec,
                architecture=layout.architecture,
                optional=is_adapter if config.lora.rank else None,
                io=io,
            ),
        )
    if config.lora.rank and start is None:
        logger.warning("lora.rank trains adapters of random weights: no checkpoint is loaded")
    return start


# -- data --------------------------------------------------------------------------------------


def build_training_samples(config: Config, *, layout: Layout, once: Once) -> MapSamples:
    """Build the samples that the run trains on, tokenized first if necessary. Collective. Raises
    DataError if data or tokenizer are missing or damaged, or differ between ranks."""
    training, tokenizer_path = config.training, config.model.tokenizer_path
    tokenizer = build_tokenizer(tokenizer_path)
    check_vocabulary(tokenizer, model_vocab_size=layout.architecture.vocab_size)
    samples = build_samples(
        training,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        seed=config.debug.seed,
        holdout_fraction=config.validation.holdout_fraction,
        once=once,
    )
    global_batch = layout.samples_per_step(training)
    check_fills_batch(
        samples, training, global_batch=global_batch, accumulation=layout.accumulation
    )
    check_data_alike(samples.fingerprint)
    return samples


def build_loader(config: Config, *, samples: MapSamples, layout: Layout, mesh: Mesh) -> Loader:
    """Build this rank's share of the samples."""
    training = config.training
    return Loader(
        samples,
        local_batch_size=training.local_batch_size,
        accumulation=layout.accumulation,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dims.dp,
        settings=training.dataloader,
        skipped=SkippedSamples(training.skip_samples),
    )


def plan_training(config: Config, *, layout: Layout, loader: Loader, step: int) -> TrainingConfig:
    """Return the section [training] with the last step; check the schedule over its steps; raise
    ConfigError if the schedule ends before a run that ends with its data."""
    global_batch, samples = layout.samples_per_step(config.training), loader.dataset
    training = plan_steps(
        config.training, samples, global_batch=global_batch, step=step, position=loader.position
    )
    if training.num_epochs is None:
        return training
    assert samples.num_samples is not None, "the data end with their epochs"
    num_samples = SkippedSamples(training.skip_samples).offset_of(samples.num_samples)
    logger.info(
        f"{plural(training.num_epochs, 'epoch')}, {num_samples} samples in all, {global_batch} per "
        f"step: the run ends with step {training.steps}"
    )
    for wrong in replace(config, training=training).schedule_violations():
        if not wrong.is_notice:
            raise ConfigError(wrong)
        logger.warning("%s", wrong)
    return training


# -- model and optimizer -----------------------------------------------------------------------


def build_head_loss(
    config: Config, *, layout: Layout, mesh: Mesh, device: torch.device
) -> HeadLoss:
    """Build the loss of the model's head."""
    training = config.training
    splits_logits = mesh.dims.tp > 1 and not config.parallelism.disable_loss_parallel
    in_flight = 1 if layout.pipeline is None else layout.pipeline.losses_in_flight
    build = partial(
        build_loss,
        mesh.params.get_group("tp") if splits_logits else None,
        num_chunks=training.loss_chunks,
        # each loss that waits for its backward would hold a gradient as large as the weight
        recompute=in_flight > 1,
        backend=config.compile.loss_backend,
    )
    if training.loss in OF_PAIRS:
        from torchtitan.finetune.preferences import PreferenceLoss

        group = mesh.data.get_group("cp") if mesh.dims.cp > 1 else None
        return PreferenceLoss(
            training.loss,
            training.loss_options,
            log_loss=build(per_token=True),
            group=group,
            device=device,
        )
    return build(token_losses=find_loss(training.loss, training.loss_options))


def build_model(
    config: Config,
    *,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    loss: HeadLoss,
    fill: Callable[[LanguageModel], None] | None = None,
) -> tuple[ModelParts, Execution]:
    """Build this rank's parts of the model with their loss, and what runs batches through them.

    `fill` gives a part memory and weights. Default: the initial weights.
    """
    training = config.training
    if fill is None:
        offloads, seed = training.enable_cpu_offload, config.debug.seed
        fill = partial(materialize, device=device, offloads=offloads, seed=seed)
    return build_model_and_execution(
        layout,
        mesh=mesh,
        training=training,
        parallelism=config.parallelism,
        recomputation=config.activation_checkpoint,
        compilation=config.compile,
        device=device,
        loss=loss,
        fill=fill,
    )


# -- what is saved and recorded ----------------------------------------------------------------


def balance_experts(
    config: Config, *, layout: Layout, model: ModelParts, mesh: Mesh, device: torch.device
) -> Balance | None:
    """Build what balances this rank's experts. None for a model without experts."""
    if not layout.counts.num_experts:
        return None
    from torchtitan.optim.balance import build_balance

    return build_balance(
        config.router,
        parts=model,
        counts=layout.counts,
        trained=layout.trained,
        mesh=mesh,
        device=device,
    )


def build_checkpoints(
    config: Config,
    *,
    layout: Layout,
    state: RunState,
    last_step: int,
    io: CheckpointIO | None,
    validator: Validator | None,
    events: EventLog | None,
) -> CheckpointManager | None:
    """Build what saves the run. None if checkpoints are off."""
    if io is None or not config.checkpoint.enable:
        return None
    from torchtitan.checkpoint.manager import CheckpointManager

    export: Export | None = None
    if config.checkpoint.last_save_in_hf:
        from torchtitan.hf.export import export as export_to_hf

        dtype = getattr(torch, config.checkpoint.export_dtype)
        settings = describe_export(config, dtype=dtype)
        export = partial(export_to_hf, settings=settings, group=io.group)
    return CheckpointManager(
        state,
        settings=config.checkpoint,
        io=io,
        manifest={
            "layout": asdict(layout.dims),
            "config": to_toml(config),
            "last_step": last_step,
        },
        export=export,
        validation_data=None if validator is None else validator.data,
        events=events,
    )


def describe_export(config: Config, *, dtype: torch.dtype | None) -> HFExport:
    """Describe the Hugging Face folder of a job's weights, in `dtype`; None as they are stored;
    raise UserError if the job's tokenizer, or the folder that it started from, is damaged or
    missing."""
    from torchtitan.hf import describe

    spec, architecture = find_model(config.model)
    description = config.job.description
    return describe.describe_export(
        spec,
        architecture,
        dtype=dtype,
        name=Path(config.job.dump_folder).resolve().name,
        description="" if description == JobConfig().description else description,
        tokenizer_path=config.model.tokenizer_path,
        training=config.training,
        lora=config.lora,
        checkpoint=config.checkpoint,
    )


# -- what is logged ----------------------------------------------------------------------------


def log_job(
    config: Config, *, layout: Layout, device: torch.device, precision: str = "as set"
) -> None:
    """Log what is trained, where and how; `precision` is the reason for its dtype."""
    training, counts, seq_len = config.training, layout.counts, config.training.seq_len
    active = f" ({counts.num_active:,} active)" if counts.num_idle else ""
    logger.info(
        f"{config.model.name} {describe_model(config.model, spec=layout.spec)}: "
        f"{counts.num_parameters:,} parameters{active}, "
        f"{counts.flops_per_token(seq_len):.3g} FLOPs per token at seq_len {seq_len}"
    )
    logger.info(
        f"{layout.dims.world_size} x {device_name(device)}, layout: {layout.dims}, "
        f"{plural(layout.samples_per_step(training), 'sample')} per step, computing in "
        f"{training.mixed_precision_param} ({precision}) from {training.dtype} weights"
    )
    if (float8 := layout.float8) is not None:
        logger.info(
            "Linear layers of blocks multiply in float8 (%s%s); MFU is still of bfloat16's peak",
            float8.recipe_name or "tensorwise",
            ", emulated" if float8.emulate else "",
        )
    if config.job.print_config:
        logger.info("Settings:\n%s", to_toml(config))
