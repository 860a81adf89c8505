"""From the settings and this rank's place to everything the trainer holds, straight down.

    mesh -> data -> model (meta) -> parallelize -> initial weights -> optimizer + schedule
         -> checkpoint -> metrics

What a setting or a file can get wrong fails here, before the first long work.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.base.determinism import set_determinism
from torchtitan.base.device import device_name, device_type, local_device, peak_flops
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.checkpoint.manager import CheckpointManager, build_group
from torchtitan.checkpoint.restore import restore
from torchtitan.checkpoint.start import Comparison, Start, choose_start, refuse_differences
from torchtitan.checkpoint.state import Progress, RunState
from torchtitan.checkpoint.storage import find_steps
from torchtitan.config.load import to_toml
from torchtitan.config.schema import Config, DebugConfig
from torchtitan.config.trajectory import Job, trajectory_differences
from torchtitan.data.dataset import build_dataset
from torchtitan.data.loader import Loader, accumulation_steps
from torchtitan.data.sample_log import SampleLog
from torchtitan.data.tokenizer import build_tokenizer, check_vocabulary
from torchtitan.mesh.dims import Mesh, ParallelDims, build_mesh, resolve_dims
from torchtitan.mesh.process_group import Launch, set_timeout
from torchtitan.metrics.meter import Meter
from torchtitan.metrics.sinks import Sink, build_sinks
from torchtitan.models import MODELS
from torchtitan.models.parts import ModelParts
from torchtitan.models.spec import DecoderConfig, ModelSpec, flops_per_token, num_parameters
from torchtitan.optim.loss import cross_entropy_sum
from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.schedule import build_schedule
from torchtitan.parallel.build import build_execution, build_model
from torchtitan.parallel.context import build_shard, check_heads
from torchtitan.parallel.execution import Execution
from torchtitan.trainer import Run

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.toml"


def assemble(config: Config, *, launch: Launch, color: bool) -> Run:
    """Build the run, resumed where there is a checkpoint; the process group must exist.

    Raises:
        UserError: Degrees, sizes, files or a checkpoint do not fit this job.
    """
    training = config.training
    dims = resolve_dims(config.parallelism, world_size=launch.world_size)
    accumulation = accumulation_steps(
        training.global_batch_size, local_batch_size=training.local_batch_size, dp=dims.dp
    )
    tokens_per_step = training.local_batch_size * dims.dp * accumulation * training.seq_len
    spec, architecture = find_fitting_model(config)
    group = build_group() if config.checkpoint.enable else None
    start = find_start(config, dims=dims, group=group)
    device = prepare_device(config.debug, local_rank=launch.local_rank)
    log_job(config, architecture=architecture, dims=dims, device=device)
    mesh = build_mesh(dims, device_type=device.type)
    set_timeout(config.comm.init_timeout_seconds, groups=mesh.groups())
    progress = Progress()
    loader = build_loader(
        config, mesh=mesh, accumulation=accumulation, architecture=architecture, progress=progress
    )
    model, execution = build_parts(
        config, spec=spec, architecture=architecture, mesh=mesh, device=device
    )
    optimizer = build_optimizer(model, settings=config.optimizer)
    state = RunState(
        model=model,
        optimizer=optimizer,
        schedule=describe_schedule(config),
        loader=loader,
        progress=progress,
    )
    checkpoints = build_checkpoints(config, dims=dims, state=state, start=start, group=group)
    execution.after_update()  # a checkpoint may have changed the weights
    write_config(config)
    return Run(
        device=device,
        mesh=mesh,
        model=model,
        execution=execution,
        shard=build_shard(config.parallelism, mesh=mesh),
        optimizer=optimizer,
        schedule=build_schedule(
            config.lr_scheduler, peak_lr=config.optimizer.lr, training_steps=training.steps
        ),
        loader=loader,
        progress=progress,
        checkpoints=checkpoints,
        meter=build_meter(config, architecture=architecture, device=device, dims=dims),
        sinks=find_sinks(config, rank=launch.rank, resume_step=progress.step, color=color),
        training=training,
        tokens_per_step=tokens_per_step,
        log_freq=config.metrics.log_freq,
        train_timeout_seconds=config.comm.train_timeout_seconds,
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


def find_fitting_model(config: Config) -> tuple[ModelSpec, DecoderConfig]:
    """Look up the job's model, and refuse degrees that do not divide its sizes."""
    spec, architecture = find_model(config.model.name, flavor=config.model.flavor)
    check_heads(architecture, parallelism=config.parallelism)
    return spec, architecture


def find_start(
    config: Config, *, dims: ParallelDims, group: dist.ProcessGroup | None
) -> Start | None:
    """Find what the run starts from, and refuse the results of another job; None: from nothing.

    Raises:
        CheckpointError: Lists the settings that differ from those of the checkpoint, or of the
            results where there is no checkpoint.
    """
    now = Job(config=config, dp=dims.dp)
    root = Path(config.job.dump_folder)
    folder = root / config.checkpoint.folder
    start = None
    if group is not None:
        compare = partial(compare_jobs, now=now)
        start = choose_start(config.checkpoint, folder=folder, compare=compare, group=group)
    stored = root / CONFIG_FILE
    has_results = any(root.glob("metrics*.jsonl")) or find_steps(folder)
    from_own = start is not None and start.source.parent == folder
    if stored.is_file() and has_results and not from_own:
        then = Job.stored(stored.read_text(encoding="utf-8"))
        refuse_differences(root, tuple(trajectory_differences(then, now)))
    dist.barrier()  # nobody writes before everybody has looked
    return start


def compare_jobs(manifest: Mapping[str, Any], *, now: Job) -> Comparison:
    """Compare this job with the one whose checkpoint has this manifest."""
    layout = ParallelDims(**manifest["layout"])
    then = Job.stored(manifest["config"], dp=layout.dp)
    differences = trajectory_differences(then, now)
    before, after = then.config.checkpoint, now.config.checkpoint
    same = (before.mode, before.exclude_from_loading) == (after.mode, after.exclude_from_loading)
    return Comparison(differences=tuple(differences), same_loading=same)


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


def build_loader(
    config: Config,
    *,
    mesh: Mesh,
    accumulation: int,
    architecture: DecoderConfig,
    progress: Progress,
) -> Loader:
    """Build this rank's share of the data, tokenised first where that is not done yet."""
    training = config.training
    tokenizer = build_tokenizer(config.model.tokenizer_path)
    check_vocabulary(tokenizer, model_vocab_size=architecture.vocab_size)
    dataset = build_dataset(training, tokenizer=tokenizer, seed=config.debug.seed)
    global_batch_size = training.local_batch_size * mesh.dims.dp * accumulation
    if dataset.num_samples is not None and dataset.num_samples < global_batch_size:
        raise DataError(
            f"the data must fill one global batch: {training.num_epochs} epochs of it hold "
            f"{dataset.num_samples} samples of {training.seq_len} tokens, the batch "
            f"{global_batch_size}; add data, or lower training.global_batch_size or seq_len"
        )
    return Loader(
        dataset,
        local_batch_size=training.local_batch_size,
        accumulation=accumulation,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dims.dp,
        settings=training.dataloader,
        on_sample=build_sample_log(config, mesh, progress)
        if config.debug.log_sample_hashes
        else None,
    )


def build_sample_log(config: Config, mesh: Mesh, progress: Progress) -> SampleLog:
    """Build what writes down the samples that this rank draws."""
    return SampleLog(
        Path(config.job.dump_folder) / "samples",
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        writes=mesh.is_first_of_dp_rank,
        # samples are drawn for the step after the last one that is done
        step=lambda: progress.step + 1,
    )


def build_parts(
    config: Config,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    mesh: Mesh,
    device: torch.device,
) -> tuple[ModelParts, Execution]:
    """Build this rank's parts of the model, and what runs batches through all of them."""
    model = build_model(
        spec,
        architecture=architecture,
        mesh=mesh,
        training=config.training,
        parallelism=config.parallelism,
        activation_checkpoint=config.activation_checkpoint,
        device=device,
        seed=config.debug.seed,
    )
    return model, build_execution(model, loss=cross_entropy_sum)


def describe_schedule(config: Config) -> dict[str, Any]:
    """Return all that the learning rate is computed from."""
    schedule = {"peak_lr": config.optimizer.lr, "training_steps": config.training.steps}
    return schedule | asdict(config.lr_scheduler)


def build_checkpoints(
    config: Config,
    *,
    dims: ParallelDims,
    state: RunState,
    start: Start | None,
    group: dist.ProcessGroup | None,
) -> CheckpointManager | None:
    """Build what saves the run, None where checkpoints are off, and load what it starts from."""
    if group is None:
        return None
    if start is not None:
        restore(state, start=start, group=group)
    return CheckpointManager(
        state,
        settings=config.checkpoint,
        folder=Path(config.job.dump_folder) / config.checkpoint.folder,
        manifest={"layout": asdict(dims), "config": to_toml(config)},
        group=group,
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


def build_meter(
    config: Config, *, architecture: DecoderConfig, device: torch.device, dims: ParallelDims
) -> Meter:
    """Build the meter, and say what its MFU is measured against."""
    peak = peak_flops(device, dtype=getattr(torch, config.training.mixed_precision_param))
    logger.info("MFU is measured against %s", peak.source)
    return Meter(
        flops_per_token=flops_per_token(architecture, config.training.seq_len),
        peak_flops=peak.value,
        world_size=dims.world_size,
        device=device,
    )


def log_job(
    config: Config, *, architecture: DecoderConfig, dims: ParallelDims, device: torch.device
) -> None:
    """Say what is about to be trained, where, and how."""
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
    if config.job.print_config:
        logger.info("Settings:\n%s", to_toml(config))


def write_config(config: Config) -> None:
    """Write the resolved settings into the run's folder, from rank 0."""
    if dist.get_rank() != 0:
        return
    names = [CONFIG_FILE]
    if config.job.save_config_file is not None:
        names.append(config.job.save_config_file)
    for name in names:
        path = Path(config.job.dump_folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(to_toml(config), encoding="utf-8")
