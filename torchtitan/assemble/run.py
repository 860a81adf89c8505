"""Everything the trainer holds, straight down.

    layout -> checkpoint to start from -> mesh -> data -> model (meta) -> parallelize -> initial
    weights -> validation -> optimizer -> load -> metrics -> schedule

A mistake in a setting or a file fails here, before the first long work.
"""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.assemble.data import build_loader
from torchtitan.assemble.layout import check_device, find_layout, log_job
from torchtitan.assemble.precision import resolve_precision
from torchtitan.assemble.resume import (
    build_checkpoints,
    describe_schedule,
    find_start,
    write_config,
)
from torchtitan.assemble.validation import build_validator
from torchtitan.base.determinism import set_determinism
from torchtitan.base.device import device_type, local_device
from torchtitan.checkpoint.manager import build_group
from torchtitan.checkpoint.start import Start
from torchtitan.checkpoint.state import Progress, RunState
from torchtitan.data.loader import Loader
from torchtitan.job import Config
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.mesh.process_group import Launch, set_timeout
from torchtitan.metrics.meter import Meter, build_meter
from torchtitan.metrics.sinks import Sink, build_sinks
from torchtitan.metrics.trace import Profiler, build_profiler
from torchtitan.models.parts import ModelParts
from torchtitan.optim.loss import build_loss
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import build_schedule
from torchtitan.parallel.build import build_model_and_execution
from torchtitan.parallel.context.build import build_shard
from torchtitan.parallel.execution import Execution
from torchtitan.parallel.layout import Layout
from torchtitan.trainer import Run


def assemble(config: Config, *, launch: Launch, color: bool, undo: ExitStack | None = None) -> Run:
    """Build the run, resumed where there is a checkpoint; the process group must exist. The folder
    is locked until `undo`, or the end of the process.

    Raises:
        UserError: Degrees, sizes, files or a checkpoint do not fit this job.
    """
    layout = find_layout(config, world_size=launch.world_size)
    check_device(config, device_type=device_type())
    config, precision = resolve_precision(config)
    group = build_group() if config.checkpoint.enable else None
    start = find_start(config, layout=layout, group=group, undo=undo)
    set_determinism(  # before anything runs on the device
        seed=config.debug.seed,
        deterministic=config.debug.deterministic,
        warn_only=config.debug.deterministic_warn_only,
        device_type=device_type(),
        environ=os.environ,
    )
    device = local_device(launch.local_rank)
    log_job(config, layout=layout, device=device, precision=precision)
    mesh = build_mesh(layout.dims, device_type=device.type)
    set_timeout(config.comm.init_timeout_seconds, groups=mesh.groups())
    return build_run(
        config,
        layout=layout,
        mesh=mesh,
        device=device,
        start=start,
        group=group,
        color=color,
    )


def build_run(
    config: Config,
    *,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    start: Start | None,
    group: dist.ProcessGroup | None,
    color: bool,
) -> Run:
    """Build all parts of the run: data, model, optimizer, checkpoints, metrics."""
    training, progress = config.training, Progress()
    loader = build_loader(config, layout=layout, mesh=mesh, progress=progress)
    shard = build_shard(config.parallelism, training=training, mesh=mesh)
    model, execution = build_model(config, layout=layout, mesh=mesh, device=device)
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
        config, dims=layout.dims, state=state, start=start, group=group, validation_data=data
    )
    execution.after_update()  # a checkpoint may have changed the weights
    write_config(config)
    meter, sinks, profiler = build_reports(
        config, layout=layout, device=device, resume_step=progress.step, color=color
    )
    return Run(
        device=device,
        mesh=mesh,
        model=model,
        execution=execution,
        shard=shard,
        optimizer=state.optimizer,
        schedule=build_schedule(
            config.lr_scheduler, peak_lr=config.optimizer.lr, training_steps=training.steps
        ),
        loader=loader,
        progress=progress,
        checkpoints=checkpoints,
        validator=validator,
        meter=meter,
        sinks=sinks,
        profiler=profiler,
        training=training,
        tokens_per_step=layout.samples_per_step(training) * training.seq_len,
        log_freq=config.metrics.log_freq,
        train_timeout_seconds=config.comm.train_timeout_seconds,
    )


def build_model(
    config: Config, *, layout: Layout, mesh: Mesh, device: torch.device
) -> tuple[ModelParts, Execution]:
    """Build this rank's parts of the model with their loss, and what runs batches through all."""
    splits_logits = mesh.dims.tp > 1 and not config.parallelism.disable_loss_parallel
    in_flight = 1 if layout.pipeline is None else layout.pipeline.losses_in_flight
    loss = build_loss(
        mesh.params.get_group("tp") if splits_logits else None,
        num_chunks=config.training.loss_chunks,
        # each loss that waits for its backward would hold a gradient as large as the weight
        recompute=in_flight > 1,
    )
    return build_model_and_execution(
        layout, mesh=mesh, settings=config, device=device, seed=config.debug.seed, loss=loss
    )


def build_state(
    config: Config, *, model: ModelParts, loader: Loader, progress: Progress
) -> RunState:
    """Build the optimizer, and gather all that a checkpoint holds."""
    return RunState(
        model=model,
        optimizer=build_optimizer(
            model,
            settings=config.optimizer,
            dtype=getattr(torch, config.training.mixed_precision_param),
        ),
        schedule=describe_schedule(config),
        loader=loader,
        progress=progress,
    )


def build_reports(
    config: Config,
    *,
    layout: Layout,
    device: torch.device,
    resume_step: int,
    color: bool,
) -> tuple[Meter, list[Sink], Profiler | None]:
    """Build what measures this rank, what receives the figures, and what records traces."""
    training, folder, rank = config.training, Path(config.job.dump_folder), dist.get_rank()
    meter = build_meter(
        flops_per_token=layout.counts.flops_per_token(training.seq_len),
        dtype=getattr(torch, training.mixed_precision_param),
        world_size=layout.dims.world_size,
        device=device,
    )
    sinks = build_sinks(
        config.metrics,
        folder=folder,
        rank=rank,
        resume_step=resume_step,
        color=color,
        job_config=asdict(config),
        description=config.job.description,
    )
    return meter, sinks, build_profiler(config.profiling, folder=folder, rank=rank, device=device)
