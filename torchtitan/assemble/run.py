"""Everything the trainer holds, straight down.

    mesh -> data -> model (meta) -> parallelize -> initial weights -> optimizer + schedule
         -> checkpoint -> metrics

What a setting or a file can get wrong fails here, before the first long work.
"""

from __future__ import annotations

import logging
import math
import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch

from torchtitan.assemble.data import build_loader
from torchtitan.assemble.layout import Layout, check_device, find_layout, log_job
from torchtitan.assemble.precision import settle_precision
from torchtitan.assemble.resume import (
    build_checkpoints,
    describe_schedule,
    find_start,
    write_config,
)
from torchtitan.assemble.validation import build_validator
from torchtitan.base.determinism import set_determinism
from torchtitan.base.device import device_type, local_device, peak_flops
from torchtitan.checkpoint.manager import build_group
from torchtitan.checkpoint.state import Progress, RunState
from torchtitan.data.loader import Loader
from torchtitan.job import Config, DebugConfig
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.mesh.process_group import Launch, gather, set_timeout
from torchtitan.metrics.meter import Meter
from torchtitan.metrics.sinks import Sink, build_sinks
from torchtitan.metrics.trace import Profiler, build_profiler
from torchtitan.models.parts import ModelParts
from torchtitan.optim.loss import build_loss
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import Schedule, build_schedule
from torchtitan.parallel.build import build_model_and_execution
from torchtitan.parallel.context.build import build_shard
from torchtitan.parallel.execution import Execution
from torchtitan.trainer import Run

logger = logging.getLogger(__name__)


def assemble(config: Config, *, launch: Launch, color: bool, undo: ExitStack | None = None) -> Run:
    """Build the run, resumed where there is a checkpoint; the process group must exist. The folder
    is locked until `undo`, or the end of the process.

    Raises:
        UserError: Degrees, sizes, files or a checkpoint do not fit this job.
    """
    layout = find_layout(config, world_size=launch.world_size)
    check_device(config, device_type=device_type())
    config, precision = settle_precision(config)
    training, dims = config.training, layout.dims
    group = build_group() if config.checkpoint.enable else None
    start = find_start(config, layout=layout, group=group, undo=undo)
    device = prepare_device(config.debug, local_rank=launch.local_rank)
    log_job(config, layout=layout, device=device, precision=precision)
    mesh = build_mesh(dims, device_type=device.type)
    set_timeout(config.comm.init_timeout_seconds, groups=mesh.groups())

    progress = Progress()
    loader = build_loader(config, layout=layout, mesh=mesh, progress=progress)
    shard = build_shard(config.parallelism, training=training, mesh=mesh)
    model, execution = build_parts(config, layout=layout, mesh=mesh, device=device)
    validator = build_validator(
        config,
        mesh=mesh,
        model=model,
        execution=execution,
        shard=shard,
        device=device,
        trained_on=loader.dataset,
    )
    state = build_state(config, model=model, loader=loader, progress=progress)
    data = None if validator is None else validator.data
    checkpoints = build_checkpoints(
        config, dims=dims, state=state, start=start, group=group, validation_data=data
    )
    execution.after_update()  # a checkpoint may have changed the weights
    write_config(config)
    return Run(
        device=device,
        mesh=mesh,
        model=model,
        execution=execution,
        shard=shard,
        optimizer=state.optimizer,
        schedule=find_schedule(config),
        loader=loader,
        progress=progress,
        checkpoints=checkpoints,
        validator=validator,
        meter=build_meter(config, layout=layout, device=device),
        sinks=find_sinks(config, rank=launch.rank, resume_step=progress.step, color=color),
        profiler=find_profiler(config, rank=launch.rank, device=device),
        training=training,
        tokens_per_step=(
            training.local_batch_size * dims.dp * layout.accumulation * training.seq_len
        ),
        log_freq=config.metrics.log_freq,
        train_timeout_seconds=config.comm.train_timeout_seconds,
    )


def build_state(
    config: Config, *, model: ModelParts, loader: Loader, progress: Progress
) -> RunState:
    """Build the optimizer, and gather all that a checkpoint holds."""
    return RunState(
        model=model,
        optimizer=build_optimizer(model, settings=config.optimizer),
        schedule=describe_schedule(config),
        loader=loader,
        progress=progress,
    )


def find_schedule(config: Config) -> Schedule:
    """Return the learning rate as a function of the step."""
    return build_schedule(
        config.lr_scheduler,
        peak_lr=config.optimizer.lr,
        training_steps=config.training.steps,
    )


def prepare_device(debug: DebugConfig, *, local_rank: int) -> torch.device:
    """Take this rank's device, determinism first: it must be settled before anything runs there."""
    set_determinism(
        seed=debug.seed,
        deterministic=debug.deterministic,
        warn_only=debug.deterministic_warn_only,
        device_type=device_type(),
        environ=os.environ,
    )
    return local_device(local_rank)


def build_parts(
    config: Config, *, layout: Layout, mesh: Mesh, device: torch.device
) -> tuple[ModelParts, Execution]:
    """Build this rank's parts of the model, and what runs batches through all of them."""
    splits_logits = mesh.dims.tp > 1 and not config.parallelism.disable_loss_parallel
    in_flight = 1 if layout.pipeline is None else layout.pipeline.losses_in_flight
    return build_model_and_execution(
        layout.spec,
        architecture=layout.architecture,
        mesh=mesh,
        layout=layout.pipeline,
        training=config.training,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        compiler=config.compile,
        float8=config.quantize.linear.float8 if config.model.converters else None,
        lora=config.lora,
        trained=layout.trained,
        device=device,
        seed=config.debug.seed,
        loss=build_loss(
            mesh.params.get_group("tp") if splits_logits else None,
            num_chunks=config.training.loss_chunks,
            # what waits for its backward would wait with a gradient as large as the weight
            recompute=in_flight > 1,
        ),
    )


def find_sinks(config: Config, *, rank: int, resume_step: int, color: bool) -> list[Sink]:
    """Build what receives the figures of this rank."""
    return build_sinks(
        config.metrics,
        folder=Path(config.job.dump_folder),
        rank=rank,
        resume_step=resume_step,
        color=color,
        job_config=asdict(config),
        description=config.job.description,
    )


def find_profiler(config: Config, *, rank: int, device: torch.device) -> Profiler | None:
    """Start what records traces of this rank, where that is asked for."""
    folder = Path(config.job.dump_folder)
    return build_profiler(config.profiling, folder=folder, rank=rank, device=device)


def build_meter(config: Config, *, layout: Layout, device: torch.device) -> Meter:
    """Build the meter, and say what MFU is a percentage of."""
    dtype = getattr(torch, config.training.mixed_precision_param)
    peak = peak_flops(device, dtype=dtype)
    ours = torch.tensor(peak.value if peak else math.nan, dtype=torch.float64, device=device)
    mean = gather(ours).mean().item()  # one figure for all ranks: none if a device has none
    if peak is not None and math.isfinite(mean):
        logger.info("MFU: percent of %.4g TFLOP/s per device (%s)", mean / 1e12, peak.source)
    return Meter(
        flops_per_token=layout.counts.flops_per_token(config.training.seq_len),
        peak_flops=mean if math.isfinite(mean) else None,
        world_size=layout.dims.world_size,
        device=device,
    )
