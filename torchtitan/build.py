"""Everything the trainer holds, straight down.

    layout -> checkpoint to start from -> mesh -> data -> model (meta) -> parallelize -> initial
    weights -> validation -> optimizer -> load -> number of steps -> metrics -> schedule

A mistake in a setting or a file fails here, before the first long work.

In which type a job computes, resolved once and for all ranks alike.

`mixed_precision_param = "auto"` depends on the machine. It is replaced by the type before anything
is built, so that the run's folder and checkpoints hold the type itself: a job resumed on a machine
where "auto" means another type is refused, not continued as another training.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

import torch
import torch.distributed as dist

from torchtitan.assemble.data import (
    build_loader,
    build_training_samples,
    check_plan,
    plan_steps,
)
from torchtitan.assemble.record import write_start
from torchtitan.assemble.resume import (
    CheckpointIO,
    build_checkpoints,
    describe_lr,
    find_start,
    open_saving,
)
from torchtitan.assemble.validation import build_validator
from torchtitan.base.determinism import set_determinism
from torchtitan.base.device import device_type, has_bfloat16, local_device
from torchtitan.callbacks import CallbackRunner, build_callbacks
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.restore import report_rate, restore
from torchtitan.checkpoint.start import Start
from torchtitan.checkpoint.state import Progress, RunState
from torchtitan.data.loader import Loader
from torchtitan.job import Config, own_sections
from torchtitan.layout import check_device, find_layout, fit_job, log_job, resolve_model
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.mesh.ranks import OncePerMachine, RankInfo, set_timeout
from torchtitan.metrics.ledger import Ledger
from torchtitan.metrics.meter import Meter, build_meter
from torchtitan.metrics.sinks import Sink, build_sinks
from torchtitan.metrics.stragglers import build_stragglers
from torchtitan.metrics.trace import Profiler, build_profiler
from torchtitan.models.interface import LanguageModel, ModelParts
from torchtitan.optim.balance import Balance, build_balance
from torchtitan.optim.loss import build_loss, find_loss
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import Schedule, build_schedule
from torchtitan.optim.spikes import SpikeDetector
from torchtitan.parallel.context.layout import build_shard
from torchtitan.parallel.execution import Execution
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.parallelize import build_model_and_execution, materialize
from torchtitan.trainer import Run
from torchtitan.validate import Validator


def assemble(
    config: Config,
    *,
    launch: RankInfo,
    color: bool,
    undo: ExitStack,
    callbacks: Sequence[object] = (),
) -> Run:
    """Build the run, resumed where there is a checkpoint; the process group must exist. The folder
    is locked until `undo`, or the end of the process. `callbacks` come after those of the settings.

    Raises:
        UserError: Degrees, sizes, files or a checkpoint do not fit this job.
    """
    config = fit_job(resolve_model(config), world_size=launch.world_size)
    layout = find_layout(config, world_size=launch.world_size)
    check_device(config, layout=layout, device_type=device_type())
    config, precision = resolve_precision(config)
    offered = {"folder": Path(config.job.dump_folder), "rank": launch.rank, **own_sections(config)}
    own = build_callbacks(config.training.callbacks, offered=offered)
    saving = open_saving(config)
    set_determinism(  # before anything runs on the device, and before data of the user's own
        seed=config.debug.seed,
        deterministic=config.debug.deterministic,
        warn_only=config.debug.deterministic_warn_only,
        device_type=device_type(),
        environ=os.environ,
    )
    # read once it is known that the run may start, unless a checkpoint's steps depend on them
    samples = cache(partial(build_training_samples, config, layout=layout, once=OncePerMachine()))
    start = find_start(config, layout=layout, samples=samples, saving=saving, undo=undo)
    device = local_device(launch.local_rank)
    log_job(config, layout=layout, device=device, precision=precision)
    mesh = build_mesh(layout.dims, device_type=device.type)
    set_timeout(config.comm.init_timeout_seconds, groups=mesh.groups())
    progress = Progress()
    loader = build_loader(config, dataset=samples(), layout=layout, mesh=mesh, progress=progress)
    run = build_run(
        config,
        layout=layout,
        mesh=mesh,
        device=device,
        loader=loader,
        progress=progress,
        start=start,
        saving=saving,
        color=color,
        hooks=CallbackRunner([*own, *callbacks], device=device),
    )
    planned = replace(config, training=run.training)
    write_start(planned, run=run, loaded=None if start is None else start.source.path)
    return run


def build_run(
    config: Config,
    *,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    loader: Loader,
    progress: Progress,
    start: Start | None,
    saving: CheckpointIO,
    color: bool,
    hooks: CallbackRunner,
) -> Run:
    """Build all parts of the run: model, optimizer, checkpoints, metrics."""
    shard = build_shard(config.parallelism, training=config.training, mesh=mesh)
    model, execution = build_model(config, layout=layout, mesh=mesh, device=device)
    balance = build_balance_of(config, layout=layout, model=model, mesh=mesh, device=device)
    validator = build_validator(
        config,
        mesh=mesh,
        model=model,
        execution=execution,
        shard=shard,
        device=device,
        once=OncePerMachine(),
    )
    spikes = build_spikes(config, mesh=mesh, device=device, ledger=saving.ledger)
    state = build_state(config, model, balance, spikes, loader=loader, progress=progress)
    config, state, checkpoints = begin(
        config, state, layout=layout, loader=loader, start=start, saving=saving, validator=validator
    )
    execution.after_update()  # a checkpoint may have changed the weights
    meter, sinks, profiler = build_reports(
        config, layout=layout, device=device, resume_step=progress.step, color=color
    )
    return Run(
        device=device,
        mesh=mesh,
        model=model,
        execution=execution,
        sequence_shard=shard,
        optimizer=state.optimizer,
        balance=balance,
        schedule=build_schedule_of(config),
        spikes=spikes,
        loader=loader,
        progress=progress,
        checkpoints=checkpoints,
        validator=validator,
        meter=meter,
        sinks=sinks,
        profiler=profiler,
        hooks=hooks,
        ledger=saving.ledger,
        training=config.training,
        tokens_per_step=layout.samples_per_step(config.training) * config.training.seq_len,
        log_freq=config.metrics.log_freq,
        train_timeout_seconds=config.comm.train_timeout_seconds,
    )


def begin(
    config: Config,
    state: RunState,
    *,
    layout: Layout,
    loader: Loader,
    start: Start | None,
    saving: CheckpointIO,
    validator: Validator | None,
) -> tuple[Config, RunState, CheckpointManager | None]:
    """Load what the run starts from, plan its steps from there on, and build what saves it."""
    if start is not None:
        assert saving.group is not None, "without checkpoints a run starts from none"
        restore(state, start=start, group=saving.group)
    at = {"step": state.progress.step, "position": loader.position}
    config = plan_steps(config, dataset=loader.dataset, layout=layout, **at)
    check_plan(config, dataset=loader.dataset, layout=layout)
    state = replace(state, lr_settings=describe_lr(config))
    if start is not None:
        report_rate(state, start=start)
    checkpoints = build_checkpoints(
        config, dims=layout.dims, state=state, saving=saving, validator=validator
    )
    return config, state, checkpoints


def build_fill(config: Config, *, device: torch.device) -> Callable[[LanguageModel], None]:
    """Build what gives a part of the model its memory and its initial weights."""
    offloads = config.training.enable_cpu_offload
    return partial(materialize, device=device, offloads=offloads, seed=config.debug.seed)


def build_state(
    config: Config,
    model: ModelParts,
    *more: Balance | SpikeDetector | None,
    loader: Loader,
    progress: Progress,
) -> RunState:
    """Gather all that a checkpoint saves, and build the optimizer, whose state is a part of it."""
    return RunState(
        model=model,
        optimizer=build_optimizer_of(config, model=model),
        lr_settings=describe_lr(config),
        loader=loader,
        progress=progress,
        more={name: one for part in more if part for name, one in part.state().items()},
    )


def build_optimizer_of(config: Config, *, model: ModelParts) -> torch.optim.Optimizer:
    """Build the optimizer of this rank's parts of the model."""
    dtype = getattr(torch, config.training.mixed_precision_param)
    sections = own_sections(config)
    return build_optimizer(model, settings=config.optimizer, dtype=dtype, sections=sections)


def build_balance_of(
    config: Config, *, layout: Layout, model: ModelParts, mesh: Mesh, device: torch.device
) -> Balance | None:
    """Build what balances the experts of this rank's parts of the model, if it has any."""
    return build_balance(
        config.router,
        parts=model,
        counts=layout.counts,
        trained=layout.trained,
        mesh=mesh,
        device=device,
    )


def build_spikes(
    config: Config, *, mesh: Mesh, device: torch.device, ledger: Ledger | None
) -> SpikeDetector | None:
    """Build what judges the steps, if anything does; `ledger`: where it is written down."""
    settings = config.spikes
    if settings.action == "none":
        return None

    def record(step: int, figure: str, value: float, bound: float) -> None:
        if ledger is not None:
            facts = {"figure": figure, "value": value, "bound": bound, "action": settings.action}
            ledger.write("spike", step=step, **facts)

    return SpikeDetector(settings, equal_ranks=mesh.dims.tp, device=device, on_spike=record)


def build_schedule_of(config: Config) -> Schedule:
    """Build the learning rate as a function of the step."""
    return build_schedule(
        config.lr_scheduler, peak_lr=config.optimizer.lr, training_steps=config.training.steps
    )


def build_model(
    config: Config,
    *,
    layout: Layout,
    mesh: Mesh,
    device: torch.device,
    fill: Callable[[LanguageModel], None] | None = None,
) -> tuple[ModelParts, Execution]:
    """Build this rank's parts of the model with their loss, and what runs batches through all.

    `fill` gives a part its memory and weights; None: as they are before the first step.
    """
    splits_logits = mesh.dims.tp > 1 and not config.parallelism.disable_loss_parallel
    in_flight = 1 if layout.pipeline is None else layout.pipeline.losses_in_flight
    loss = build_loss(
        mesh.params.get_group("tp") if splits_logits else None,
        num_chunks=config.training.loss_chunks,
        # each loss that waits for its backward would hold a gradient as large as the weight
        recompute=in_flight > 1,
        token_losses=find_loss(config.training.loss),
    )
    return build_model_and_execution(
        layout,
        mesh=mesh,
        training=config.training,
        parallelism=config.parallelism,
        recomputation=config.activation_checkpoint,
        compilation=config.compile,
        device=device,
        loss=loss,
        fill=fill or build_fill(config, device=device),
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
        stragglers=build_stragglers(
            ratio=config.metrics.straggler_ratio,
            num_stages=layout.dims.pp,
            world_size=layout.dims.world_size,
            device=device,
        ),
    )
    sinks = build_sinks(
        config.metrics,
        folder=folder,
        rank=rank,
        resume_step=resume_step,
        color=color,
        job_config=asdict(config),
        description=config.job.description,
        sections=own_sections(config),
    )
    return meter, sinks, build_profiler(config.profiling, folder=folder, rank=rank, device=device)


def resolve_precision(config: Config) -> tuple[Config, str]:
    """Return the settings with "auto" resolved, and the reason; the process group must exist."""
    training = config.training
    if training.mixed_precision_param != "auto":
        return config, "as set"
    if training.dtype == "bfloat16":
        chosen, reason = "bfloat16", "auto: as the weights are stored"
    elif config.model.converters:
        chosen, reason = "bfloat16", "auto: as float8 wants it"
    else:
        chosen, reason = _choose(device_type())
    resolved = replace(training, mixed_precision_param=chosen)  # type: ignore[arg-type]
    return replace(config, training=resolved), reason


def _choose(kind: str) -> tuple[str, str]:
    """Ask all ranks: one that computed in another type would train another model."""
    device = "GPUs" if kind == "cuda" else "CPUs"
    lacking = torch.tensor(int(not has_bfloat16(kind)))  # on the host: no GPU is taken yet
    dist.all_reduce(lacking)
    num_lacking, world_size = int(lacking), dist.get_world_size()
    if num_lacking == 0:
        return "bfloat16", f"auto: the {device} multiply it by themselves"
    ranks = "all" if num_lacking == world_size else f"{num_lacking} of {world_size}"
    return "float32", f"auto: the {device} of {ranks} ranks do not multiply bfloat16 by themselves"
