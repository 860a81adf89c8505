"""From which checkpoint a run starts, and what the next start will compare itself with.

A run's folder belongs to one training. The settings in its checkpoints and in `config.toml` say
which: a job whose settings shape another one is refused before it writes there.
"""

from __future__ import annotations

import logging
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from torchtitan.assemble.hf import chosen_rotation, describe_export, warn_of_other_tokenizer
from torchtitan.assemble.layout import Layout
from torchtitan.assemble.trained import check_scale, warn_of_random_base
from torchtitan.base.device import device_type
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import Content
from torchtitan.checkpoint.hf import HeadDim, head_dim_of_rows
from torchtitan.checkpoint.hf_folder import HFFolder, open_folder
from torchtitan.checkpoint.hf_lora import weight_beside
from torchtitan.checkpoint.hf_write import export
from torchtitan.checkpoint.lock import lock_folder
from torchtitan.checkpoint.manager import CheckpointManager, Export, check_staging
from torchtitan.checkpoint.pt_file import open_file
from torchtitan.checkpoint.ranks import on_first_rank
from torchtitan.checkpoint.restore import restore
from torchtitan.checkpoint.settings import WEIGHT_FILES
from torchtitan.checkpoint.source import row_order
from torchtitan.checkpoint.start import (
    Comparison,
    Start,
    choose_start,
    refuse_differences,
    stored_layout,
)
from torchtitan.checkpoint.state import RunState
from torchtitan.checkpoint.storage import find_steps
from torchtitan.config.toml_files import to_toml
from torchtitan.job import Config
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.faults import Pulse
from torchtitan.mesh.process_group import job_store
from torchtitan.trajectory import Job, trajectory_differences

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.toml"
TRIAL_CONFIG_FILE = "config.load_only.toml"
"""Settings of a start that only loads: the folder's results are not its own."""


def find_start(
    config: Config, *, layout: Layout, group: dist.ProcessGroup | None, undo: ExitStack | None
) -> Start | None:
    """Take the folder, find what the run starts from (None: nothing); refuse another job's results.

    `undo` gives the folder back.

    Raises:
        CheckpointError: Another run writes there; or settings differ from those of the checkpoint,
            or of the results where there is no checkpoint.
    """
    check_staging(config.checkpoint, device_type=device_type())
    now = Job(config=config, dp=layout.dims.dp)
    root = Path(config.job.dump_folder)
    lock_folder(root, undo=undo)
    folder = root / config.checkpoint.folder
    start = None
    if group is not None:
        compare = partial(compare_jobs, now=now)
        about = {"config": config, "layout": layout, "group": group}
        start = choose_start(
            config.checkpoint,
            folder=folder,
            compare=compare,
            open_hf=partial(open_weights, **about),
            open_plain=partial(find_halves, **about),
            group=group,
        )
        if start is not None:
            check_scale(start, lora=config.lora, group=group)
        if start is not None and start.hf is not None and start.source.is_dir():
            warn_of_other_tokenizer(config, origin=start.source)
    stored = root / CONFIG_FILE
    has_results = any(root.glob("metrics*.jsonl")) or find_steps(folder)
    from_own = start is not None and start.source.parent == folder
    if stored.is_file() and has_results and not from_own:
        then = Job.stored_in(stored)
        differences = tuple(trajectory_differences(then, now))
        refuse_differences(root, differences, has_checkpoint=bool(find_steps(folder)))
    if start is None:
        warn_of_random_base(config)
    dist.barrier()  # nobody writes before everybody has looked
    return start


def open_weights(
    path: Path, *, config: Config, layout: Layout, group: dist.ProcessGroup
) -> HFFolder:
    """Open a folder of Hugging Face, or a single file, of this job's model."""
    checkpoint = config.checkpoint
    settings: dict[str, Any] = {
        "spec": layout.spec,
        "architecture": layout.architecture,
        "exclude": checkpoint.exclude_from_loading,
        "grows_vocab": checkpoint.grow_vocab,
        "group": group,
    }
    if path.suffix in WEIGHT_FILES:
        return open_file(path, rope=checkpoint.initial_load_rope, **settings)
    return open_folder(path, chosen=chosen_rotation(config.model), **settings)


def find_halves(path: Path, *, config: Config, layout: Layout, group: dist.ProcessGroup) -> HeadDim:
    """Tell the parameters whose rows lie in halves in a plain DCP folder."""
    logger.info("%s says no sizes but shapes: the others are those of model.flavor", path)
    spec, setting = layout.spec, config.checkpoint.initial_load_rope
    if row_order(path, setting=setting, spec=spec, group=group) == "interleaved":
        return lambda name: None
    return lambda name: head_dim_of_rows(
        weight_beside(name) or name, names=spec.hf, architecture=layout.architecture
    )


def compare_jobs(manifest: Content, *, now: Job) -> Comparison:
    """Compare this job with the one whose checkpoint has this manifest."""
    layout = stored_layout(manifest)
    then = Job.stored(manifest["config"], file=manifest.path, dp=layout.dp)
    before, after = then.config.checkpoint, now.config.checkpoint
    same_exclusion = before.exclude_from_loading == after.exclude_from_loading
    return Comparison(
        differences=tuple(trajectory_differences(then, now, data_is_checked=True)),
        same_loading=before.mode == after.mode and same_exclusion,
        same_exclusion=same_exclusion,
        load_step=before.load_step,
    )


def build_checkpoints(
    config: Config,
    *,
    dims: ParallelDims,
    state: RunState,
    start: Start | None,
    group: dist.ProcessGroup | None,
    validation_data: str | None,
) -> CheckpointManager | None:
    """Build what saves the run, None where checkpoints are off, and load what it starts from.

    `validation_data`: what tells the data of the validation from others, where there is one.
    """
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
        pulse=Pulse(
            job_store(),
            rank=dist.get_rank(),
            world_size=dims.world_size,
            limit_seconds=config.comm.train_timeout_seconds,
        ),
        export=build_export(config, group=group),
        validation_data=validation_data,
    )


def build_export(config: Config, *, group: dist.ProcessGroup) -> Export | None:
    """Build what writes the last weights for Hugging Face; None where that is not asked for."""
    if not config.checkpoint.last_save_in_hf or config.checkpoint.load_only:
        return None
    settings = describe_export(config, dtype=getattr(torch, config.checkpoint.export_dtype))
    return partial(export, settings=settings, group=group)


def describe_schedule(config: Config) -> dict[str, Any]:
    """Return all that the learning rate is computed from."""
    schedule = {"peak_lr": config.optimizer.lr, "training_steps": config.training.steps}
    return schedule | asdict(config.lr_scheduler)


def write_config(config: Config) -> None:
    """Write the resolved settings into the run's folder, from rank 0.

    Raises:
        CheckpointError: They cannot be written; raised on every rank.
    """
    on_first_rank(lambda: _write_config(config), group=dist.group.WORLD)


def _write_config(config: Config) -> None:
    names = [TRIAL_CONFIG_FILE if config.checkpoint.load_only else CONFIG_FILE]
    if config.job.save_config_file is not None:
        names.append(config.job.save_config_file)
    for name in names:
        path = Path(config.job.dump_folder) / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(to_toml(config), encoding="utf-8")
        except OSError as error:
            raise CheckpointError(
                f"the settings must be written to a file in job.dump_folder, got {path}, which "
                f"cannot be written: {error.strerror}; move away what is there, or choose another "
                f"job.save_config_file or job.dump_folder"
            ) from error
