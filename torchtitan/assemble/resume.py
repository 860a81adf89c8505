"""From which checkpoint a run starts, and what the next start will compare itself with.

A run's folder belongs to one training. The settings in its checkpoints and in `config.toml` say
which: a job whose settings shape another one is refused before it writes there.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from torchtitan.assemble.data import plan_job
from torchtitan.assemble.record import write_config
from torchtitan.base.device import device_type
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.base.files import StoredJSON
from torchtitan.base.urls import is_url
from torchtitan.checkpoint.disks import find_disks
from torchtitan.checkpoint.lock import lock_folder
from torchtitan.checkpoint.manager import CheckpointManager, build_group, check_staging
from torchtitan.checkpoint.rows import HeadDim
from torchtitan.checkpoint.settings import WEIGHT_FILES, CheckpointConfig
from torchtitan.checkpoint.source import (
    Checkpoint,
    DCPFolder,
    ParameterFilter,
    WeightSource,
    row_order,
    stated_order,
)
from torchtitan.checkpoint.start import (
    Comparison,
    LoadMode,
    Start,
    choose_start,
    refuse_differences,
    stored_layout,
)
from torchtitan.checkpoint.state import VOCABULARY, RunState
from torchtitan.checkpoint.steps import resolve_step
from torchtitan.checkpoint.storage import find_steps, step_of
from torchtitan.config.toml_files import to_toml
from torchtitan.data.loader import MapSamples
from torchtitan.finetune.lora import is_adapter
from torchtitan.finetune.lora_export import weight_beside
from torchtitan.hf.names import Names
from torchtitan.job import Config
from torchtitan.layout import check_scale, not_there, warn_of_random_base
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.metrics.ledger import Ledger
from torchtitan.parallel.layout import Layout
from torchtitan.resume_rules import CONFIG_FILE, Job, shaping_code, trajectory_differences
from torchtitan.validate import Validator

if TYPE_CHECKING:  # a run without a store imports neither
    from torchtitan.checkpoint.objects import ObjectStore
    from torchtitan.checkpoint.remote import RemoteCheckpoints

logger = logging.getLogger(__name__)
INITIAL = "initial"
"""Inside the checkpoints' folder: what initial_load_path named by a URL."""


def find_start(
    config: Config,
    *,
    layout: Layout,
    samples: Callable[[], MapSamples],
    saving: CheckpointIO,
    undo: ExitStack,
) -> Start | None:
    """Take the folder, find what the run starts from (None: nothing); refuse another job's results.

    `samples` builds those of the training, on all ranks together. `undo` gives the folder back.

    Raises:
        CheckpointError: Another run writes there; or settings differ from those of the checkpoint,
            or of the results where there is no checkpoint.
    """
    check_staging(config.checkpoint, device_type=device_type())
    plan = partial(plan_job, config, layout=layout, samples=samples)
    root = Path(config.job.dump_folder)
    lock_folder(root, undo=undo)
    folder = root / config.checkpoint.local_folder
    start, group = None, saving.group
    if group is not None:
        settings = config.checkpoint
        if saving.remote is not None:
            saving.remote.pull_newest()
            settings = replace(settings, verify_on_load=False)  # it was done
        start = choose_start(
            settings,
            folder=folder,
            compare=partial(compare_jobs, plan=plan, group=group),
            open_source=partial(open_source, config=config, layout=layout, group=group),
            group=group,
        )
        if start is not None:
            check_scale(start, lora=config.lora)
    stored = root / CONFIG_FILE
    # one rank looks: a listing by each is slow on shared disks
    everyone = group or dist.group.WORLD
    has_results, has_steps = on_first_rank(
        lambda: (any(root.glob("metrics*.jsonl")), bool(find_steps(folder))), group=everyone
    )
    from_own = start is not None and start.source.path.parent == folder
    if (has_results or has_steps) and not from_own and stored.is_file():
        then = Job.stored_in(stored)
        differences = tuple(trajectory_differences(then, plan(None, then=then)))
        refuse_differences(root, differences, has_checkpoint=has_steps)
    if start is None:
        warn_of_random_base(config)
    dist.barrier()  # nobody writes before everybody has looked
    return start


def open_source(
    asked: LoadMode, *, config: Config, layout: Layout, group: dist.ProcessGroup
) -> WeightSource:
    """Open what `checkpoint.initial_load_path` names, to take from it what is asked for.

    Raises:
        CheckpointError: It is not there, damaged, or of another model or kind than the settings
            say.
    """
    from torchtitan.hf.file import open_file
    from torchtitan.hf.folder import is_hf_folder

    settings = config.checkpoint
    assert settings.initial_load_path is not None
    path, rope = Path(settings.initial_load_path), settings.initial_load_rope
    if is_url(settings.initial_load_path):
        path = _fetch_source(config, group=group)
        settings = replace(settings, load_step=-1)  # it was chosen
    is_file = path.suffix in WEIGHT_FILES
    if settings.load_step != -1 and (is_file or settings.initial_load_in_hf):
        raise ConfigError.at(
            ("checkpoint.load_step", "checkpoint.initial_load_path"),
            f"chooses among the steps of a run, got {path}, which has none; remove it",
        )
    chosen = ParameterFilter(
        exclude=() if asked == "recover" else settings.exclude_from_loading,
        may_grow=VOCABULARY if settings.grow_vocab else (),
        optional=is_adapter if config.lora.rank and asked == "finetune" else None,
    )
    how: dict[str, Any] = {"filter": chosen, "group": group}
    model: dict[str, Any] = {"spec": layout.spec, "architecture": layout.architecture}
    if is_file:
        return open_file(path, rope=rope, **model, **how)
    if settings.initial_load_in_hf:
        return _open_hf_folder(path, config=config, **model, **how)
    if on_first_rank(lambda: is_hf_folder(path), group=group):
        raise CheckpointError(
            f"checkpoint.initial_load_path {path} is a folder of Hugging Face; to start from its "
            f"weights write checkpoint.initial_load_in_hf = true"
        )
    step, is_ours = resolve_step(
        path,
        subfolder=settings.local_folder,
        load_step=settings.load_step,
        verifies=settings.verify_on_load,
        group=group,
    )
    if not is_ours:
        halves = _find_halves(step, config=config, layout=layout, group=group)
        return DCPFolder(path=step, rope_head_dim=halves, **how)
    if rope != "auto":
        raise CheckpointError(
            f"checkpoint.initial_load_rope is for weights of other writers, and {step} is of "
            f"this library, which knows the order of its rows; remove it"
        )
    return Checkpoint(path=step, **how)


def _open_hf_folder(
    path: Path, *, config: Config, group: dist.ProcessGroup, **how: Any
) -> WeightSource:
    from torchtitan.assemble.hf import chosen_rotation
    from torchtitan.hf.beside import warn_of_other_tokenizer
    from torchtitan.hf.folder import open_folder

    if not on_first_rank(lambda: path.is_dir(), group=group):
        raise not_there(str(path))
    found = open_folder(path, chosen=chosen_rotation(config.model), group=group, **how)
    warn_of_other_tokenizer(config.model.tokenizer_path, origin=path)
    return found


def _fetch_source(config: Config, *, group: dist.ProcessGroup) -> Path:
    """Fetch the step that a URL as `checkpoint.initial_load_path` means; return its folder."""
    from torchtitan.checkpoint.remote import RemoteCheckpoints

    settings = config.checkpoint
    url, number = str(settings.initial_load_path).rstrip("/"), settings.load_step
    if (named := step_of(PurePosixPath(url))) is not None:
        url, number = url.rpartition("/")[0], named
    folder = Path(config.job.dump_folder) / settings.local_folder / INITIAL
    source = RemoteCheckpoints(
        _open_url(url, key="checkpoint.initial_load_path", settings=settings),
        folder=folder,
        group=group,
        disk=find_disks(folder, group=group, timeout_seconds=settings.save_timeout_seconds),
        verifies=settings.verify_on_load,
    )
    return source.fetch(number)


def _open_url(url: str, *, key: str, settings: CheckpointConfig) -> ObjectStore:
    from torchtitan.checkpoint.objects import ObjectStore

    return ObjectStore(
        url,
        key=key,
        patience_seconds=settings.upload_timeout_seconds,
        check=settings.upload_check,
    )


def _find_halves(
    path: Path, *, config: Config, layout: Layout, group: dist.ProcessGroup
) -> HeadDim:
    """Find the parameters whose rows lie in halves in a plain DCP folder."""
    logger.info("%s has no sizes but shapes: the others are those of model.flavor", path)
    order = row_order(
        path,
        stated=on_first_rank(lambda: stated_order(path), group=group),
        setting=config.checkpoint.initial_load_rope,
        spec=layout.spec,
        may_assume=True,
    )
    if order == "interleaved":
        return lambda name: None
    return Names(layout.spec.hf, layout.architecture, weight_beside).head_dim


def compare_jobs(
    manifest: StoredJSON, *, plan: Callable[..., Job], group: dist.ProcessGroup
) -> Comparison:
    """Compare this job, planned from there on, with the one whose checkpoint has this manifest."""
    then = Job.stored(manifest["config"], file=manifest.path, dp=stored_layout(manifest).dp)
    now = plan(Checkpoint(path=manifest.path.parent, group=group), then=then)
    warn_of_other_code(manifest, now=now.config)
    differences = trajectory_differences(then, now, data_is_checked=True)
    return Comparison(differences=tuple(differences), then=then.config.checkpoint)


def warn_of_other_code(manifest: StoredJSON, *, now: Config) -> None:
    """Warn if the source of a thing of the user's own is not the one of the checkpoint."""
    code = shaping_code(now)
    for path, then in manifest.get("code", {}).items():
        if code.get(path, then) != then:
            logger.warning(
                "The source of %s is not the one that %s was saved under: what it computes may be "
                "another training",
                path,
                manifest.path,
            )


def build_checkpoints(
    config: Config,
    *,
    dims: ParallelDims,
    state: RunState,
    saving: CheckpointIO,
    validator: Validator | None,
) -> CheckpointManager | None:
    """Write down the run's settings, and build what saves it; None where checkpoints are off."""
    group = saving.group
    write_config(config)
    if group is None:
        return None
    last_in_hf = None
    if config.checkpoint.last_save_in_hf:
        from torchtitan.assemble.hf import describe_export
        from torchtitan.hf.write import export

        dtype = getattr(torch, config.checkpoint.export_dtype)
        last_in_hf = partial(export, settings=describe_export(config, dtype=dtype), group=group)
    return CheckpointManager(
        state,
        settings=config.checkpoint,
        folder=Path(config.job.dump_folder) / config.checkpoint.local_folder,
        manifest={
            "layout": asdict(dims),
            "config": to_toml(config),
            "code": shaping_code(config),
        },
        group=group,
        export=last_in_hf,
        validation_data=None if validator is None else validator.data,
        remote=saving.remote,
        ledger=saving.ledger,
    )


@dataclass(frozen=True)
class CheckpointIO:
    """What ranks save and load over together (None where checkpoints are off), and record it in."""

    group: dist.ProcessGroup | None
    ledger: Ledger | None
    """On rank 0 alone."""
    remote: RemoteCheckpoints | None = None
    """The checkpoints in the store that checkpoint.folder names, if it names one."""


def open_saving(config: Config) -> CheckpointIO:
    """Build the group of checkpoints, and open their store.

    Raises:
        ConfigError: The store's package is missing, or what is exported needs a shared disk.
    """
    settings = config.checkpoint
    group = build_group(settings.save_timeout_seconds) if settings.enable else None
    root = Path(config.job.dump_folder)
    ledger = Ledger(root) if dist.get_rank() == 0 else None
    if group is None:
        return CheckpointIO(group, ledger)
    if not is_url(settings.folder):
        if find_disks(root, group=group, timeout_seconds=settings.save_timeout_seconds) is not None:
            raise ConfigError.at(
                ("job.dump_folder", "checkpoint.folder"),
                f"must be one folder for all ranks, and some do not see what others write to "
                f"{root.absolute()}; name one on storage that all machines share, or write a URL "
                f"of an object store as checkpoint.folder",
            )
        return CheckpointIO(group, ledger)
    from torchtitan.checkpoint.remote import RemoteCheckpoints

    store = _open_url(settings.folder, key="checkpoint.folder", settings=settings)
    folder = root / settings.staging_folder
    disk = find_disks(folder, group=group, timeout_seconds=settings.save_timeout_seconds)
    if disk is not None and settings.last_save_in_hf:
        raise ConfigError.at(
            ("checkpoint.last_save_in_hf", "checkpoint.folder"),
            "needs a job.dump_folder that all ranks share; remove it, and convert a step of the "
            "store by scripts/convert_hf.py",
        )
    remote = RemoteCheckpoints(
        store, folder=folder, group=group, disk=disk, verifies=settings.verify_on_load
    )
    return CheckpointIO(group, ledger, remote)


def describe_lr(config: Config) -> dict[str, Any]:
    """Return all that the learning rate is computed from."""
    schedule = {"peak_lr": config.optimizer.lr, "training_steps": config.training.steps}
    return schedule | asdict(config.lr_scheduler)
