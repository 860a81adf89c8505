"""Which checkpoint a run starts from, and which components it loads.

`checkpoint.mode` names the purpose of loading a checkpoint:

recover    resume the same run: load everything; settings that shape the training may not differ
continue   keep weights, optimizer, step and data position, with other settings
finetune   load only the weights and start at step 0

A checkpoint in the run's own folder takes precedence over `initial_load_path`, so that running the
command of a killed job again resumes it. A step that the user names is used or is an error. Among
several steps, a damaged one is skipped for the step before it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path, PurePosixPath
from typing import Any, Literal

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON
from torchtitan.base.urls import is_url
from torchtitan.checkpoint.checksums import MANIFEST, summarize, verify
from torchtitan.checkpoint.manager import CheckpointIO
from torchtitan.checkpoint.rows import HeadsOf
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import (
    Checkpoint,
    DCPFolder,
    ParameterFilter,
    WeightSource,
    find_row_order,
)
from torchtitan.checkpoint.storage import METADATA, find_steps, list_steps, recover_commits, step_of
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)
INITIAL_PATH = "checkpoint.initial_load_path"
FETCHED = "initial"
"""Inside the folder of checkpoints: the step that a URL as initial_load_path names."""
LoadMode = Literal["recover", "continue", "finetune"]
SourceKind = Literal["same job", "own folder", "extended run", "other folder", "weights"]
EFFECTIVE_MODE: Mapping[tuple[SourceKind, LoadMode], LoadMode] = {
    # saved in the run's folder by a job with the same settings
    ("same job", "recover"): "recover",
    ("same job", "continue"): "recover",
    ("same job", "finetune"): "recover",
    # saved in the run's folder by a job with other settings
    ("own folder", "recover"): "recover",
    ("own folder", "continue"): "continue",
    ("own folder", "finetune"): "recover",
    # the same, but this job only has more steps or new exclusions
    ("extended run", "recover"): "continue",
    ("extended run", "continue"): "continue",
    ("extended run", "finetune"): "recover",
    # a checkpoint of this library elsewhere
    ("other folder", "recover"): "recover",
    ("other folder", "continue"): "continue",
    ("other folder", "finetune"): "finetune",
    # weights that another program saved
    ("weights", "finetune"): "finetune",
}
"""What is loaded, by kind of source and requested mode; a missing pair is refused. "recover" also
refuses settings that differ."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A checkpoint or weights to load, and what is loaded of it."""

    source: WeightSource
    mode: LoadMode
    """The effective mode."""
    exclude: tuple[str, ...] = ()
    """Components, and patterns of parameters or their optimizer state, that are not loaded."""
    differences: tuple[str, ...] = ()
    """Settings that differ from those of the checkpoint, a line each."""
    already_excluded: tuple[str, ...] = ()
    """Exclusions that applied at an earlier start from the source. What they reset is part of the
    source now."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of this job with the job that saved a checkpoint."""

    differences: tuple[str, ...]
    """Settings that shape the training and differ, a line each."""
    then: CheckpointConfig
    """The [checkpoint] section of that job."""
    is_longer: bool = False
    """Whether that job had reached its last step, and this one only has more of them."""


Compare = Callable[[StoredJSON], Comparison]
"""Compares this job with a checkpoint's manifest."""
OpenInitial = Callable[[LoadMode], WeightSource]
"""Opens `initial_load_path` for a requested mode."""


def stored_layout(manifest: Mapping[str, Any]) -> ParallelDims:
    """Return the layout of the ranks that saved a checkpoint."""
    layout, degrees = manifest["layout"], {axis.name for axis in fields(ParallelDims)}
    if not degrees.issuperset(layout) or not all(type(n) is int and n > 0 for n in layout.values()):
        raise CheckpointError(f"{MANIFEST}: layout must have degrees of {degrees}, got {layout}")
    return ParallelDims(**layout)


def find_start(
    settings: CheckpointConfig,
    *,
    run_folder: Path,
    io: CheckpointIO | None,
    compare: Compare,
    compare_results: Callable[[], tuple[str, ...]],
    open_initial: OpenInitial,
) -> Start | None:
    """Return what the run starts from, or None for the initial weights. Collective.

    `compare` compares this job with a checkpoint's manifest, `compare_results` with the job that
    wrote `run_folder`, which this job has locked; `open_initial` opens `initial_load_path`. `io` is
    None if nothing is saved or loaded. Raises CheckpointError if a requested checkpoint does not
    exist, or settings differ from those of the checkpoint, or of results without one.
    """
    own, start, group = None, None, dist.group.WORLD if io is None else io.group
    if io is not None and settings.enable:
        if io.remote is not None:
            io.remote.pull_newest()  # which verifies
        verifies = settings.verify_on_load and io.remote is None
        own = newest_valid_step(io.folder, verifies=verifies, group=group, recovers=True)
    if own is not None:
        start = start_from_own(settings, Checkpoint(path=own, group=group), compare=compare)
    elif settings.initial_load_path is not None:
        start = start_from_initial(settings, compare=compare, open_initial=open_initial)
    elif settings.mode == "continue" or settings.exclude_from_loading:
        raise CheckpointError(
            f"checkpoint.mode = {settings.mode!r} with checkpoint.exclude_from_loading = "
            f"{settings.exclude_from_loading} needs a checkpoint, and {run_folder} has none; set "
            f"{INITIAL_PATH}, or remove both to start from scratch"
        )
    if own is None:
        # one rank looks: a listing by each is slow on shared disks
        has_steps, has_rows = on_first_rank(
            lambda: (
                bool(find_steps(run_folder / settings.local_folder)),
                any(path.stat().st_size for path in run_folder.glob("metrics*.jsonl")),
            ),
            group=group,
        )
        if has_steps or has_rows:
            refuse_differences(run_folder, compare_results(), has_checkpoint=has_steps)
    dist.barrier()  # no rank writes before every rank has looked
    return start


def start_from_own(settings: CheckpointConfig, own: Checkpoint, *, compare: Compare) -> Start:
    """Return how to load a checkpoint in the run's own folder.

    `exclude_from_loading` applies once: what it reset has been trained since, and a restart of the
    same job, or of one with the same exclusions, loads it.
    """
    comparison, exclude = compare(own.manifest), settings.exclude_from_loading
    then = comparison.then
    if settings.load_step not in (-1, then.load_step):
        raise CheckpointError(
            f"checkpoint.load_step {settings.load_step} cannot be loaded: {own.path}, of this run, "
            f"takes precedence; choose another --job.dump_folder"
        )
    if settings.initial_load_path is not None:
        logger.info("%s is not read: %s, of this run, takes precedence", INITIAL_PATH, own.path)
    is_excluded = then.exclude_from_loading == exclude
    kind: SourceKind = "own folder"
    if then.mode == settings.mode and is_excluded and not comparison.differences:
        kind = "same job"
    elif comparison.is_longer or (exclude and not is_excluded):
        kind = "extended run"
    mode, already_excluded = EFFECTIVE_MODE[kind, settings.mode], exclude if is_excluded else ()
    if mode == "recover":
        refuse_differences(own.path, comparison.differences)
    if mode == "recover" or is_excluded:
        exclude = ()
    if "train_state" in exclude:
        raise CheckpointError(
            f'checkpoint.exclude_from_loading with "train_state" restarts at step 0, but '
            f"{own.path} would stay the newest step; set {INITIAL_PATH} to it and choose another "
            f"job.dump_folder"
        )
    return Start(
        source=replace(own, filter=ParameterFilter(exclude=exclude)),
        mode=mode,
        exclude=exclude,
        differences=comparison.differences,
        already_excluded=already_excluded,
    )


def start_from_initial(
    settings: CheckpointConfig, *, compare: Compare, open_initial: OpenInitial
) -> Start:
    """Return how to load what `initial_load_path` names."""
    if settings.mode == "continue" and settings.initial_load_model_only:
        raise CheckpointError(
            'checkpoint.mode = "continue" needs checkpoint.initial_load_model_only = false; or '
            'write mode = "finetune"'
        )
    requested: LoadMode = "finetune" if settings.initial_load_model_only else settings.mode
    source = open_initial(requested)
    kind: SourceKind = "other folder" if isinstance(source, Checkpoint) else "weights"
    mode = EFFECTIVE_MODE.get((kind, requested))
    if mode is None:
        raise CheckpointError(
            f"{source.path} has no {MANIFEST}: only its weights can be loaded; write "
            f'checkpoint.initial_load_model_only = true, with mode "finetune" or without a mode'
        )
    differences: tuple[str, ...] = ()
    if mode != "finetune" and isinstance(source, Checkpoint):
        differences = compare(source.manifest).differences
    if mode == "recover":
        refuse_differences(source.path, differences)
    exclude = () if mode == "recover" else settings.exclude_from_loading
    return Start(source=source, mode=mode, exclude=exclude, differences=differences)


def refuse_differences(
    saved_path: Path, differences: tuple[str, ...], *, has_checkpoint: bool = True
) -> None:
    """Raise CheckpointError if settings make this job another training.

    `saved_path` is a checkpoint, or the run folder of the other job.
    """
    if differences:
        way = (
            " or continue with the new ones: --checkpoint.mode continue;" if has_checkpoint else ""
        )
        raise CheckpointError(
            f"{saved_path} was made by a job with other settings:\n  "
            + "\n  ".join(differences)
            + f"\nrestore these settings;{way} or choose another --job.dump_folder for a new run"
        )


# -- the step that a path means ----------------------------------------------------------------


def resolve_step(
    path: Path,
    *,
    subfolder: str,
    load_step: int = -1,
    verifies: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Path, bool]:
    """Return the checkpoint that `path` means, and whether this library wrote it.

    `path` is the folder of a step, of checkpoints (the newest valid one is used), of a run, whose
    checkpoints are in `subfolder`, or of a DCP checkpoint of another writer. `load_step` -1: the
    newest. `group` None: this process only. Raises CheckpointError if no valid checkpoint exists,
    or the named step is damaged.
    """
    folders = (path, path / subfolder)
    candidates = [path, path.parent] if path.name == "model" else [path]
    if load_step != -1:
        candidates = [folder / f"step-{load_step}" for folder in folders]

    def look() -> tuple[Path, bool] | None:
        for file, is_ours in ((MANIFEST, True), (METADATA, False)):
            for step in candidates:
                if (step / file).is_file():
                    return step, is_ours
        return None

    match = on_first_rank(look, group=group)
    if match is not None:
        step, is_ours = match
        if is_ours and verifies and (mistakes := verify(step, group=group)):
            raise CheckpointError(
                f"{step} is damaged: {summarize(mistakes)}; name another step, or skip the check: "
                f"checkpoint.verify_on_load = false (--skip_verify of a command)"
            )
        return match
    for folder in folders if load_step == -1 else ():
        newest = newest_valid_step(folder, verifies=verifies, group=group)
        if newest is not None:
            return newest, True
    number = "" if load_step == -1 else f" {load_step} (checkpoint.load_step)"
    raise CheckpointError(
        f"{path} holds no step{number}; name the folder of a step, of checkpoints or of a run, or "
        f"convert a .pt file by torchtitan convert from-torch"
    )


def newest_valid_step(
    folder: Path, *, verifies: bool, group: dist.ProcessGroup | None, recovers: bool = False
) -> Path | None:
    """Return the newest valid checkpoint, the same on every rank. None if `folder` is empty.

    Each newer checkpoint that is damaged or incomplete is logged.

    Without `verifies` only the manifest is looked for. `recovers` commits complete drafts first:
    only for the run that owns the folder, since another run may be writing them. Raises
    CheckpointError if no checkpoint is valid.
    """

    def look() -> list[tuple[int, bool]]:
        if recovers:
            recover_commits(folder)
        return list_steps(folder)

    steps = on_first_rank(look, group=group)
    for step, has_manifest in reversed(steps):
        path = folder / f"step-{step}"
        mistakes = [] if has_manifest else [f"{MANIFEST} is missing"]
        if verifies:
            mistakes = verify(path, group=group)
        if not mistakes:
            return path
        if group is None or group.rank() == 0:
            logger.warning("%s is damaged and is not used: %s", path, summarize(mistakes))
    if steps:
        raise CheckpointError(
            f"none of {len(steps)} checkpoints in {folder} is valid, the newest is step "
            f"{steps[-1][0]}; restore one from a copy, or move them away to start from scratch"
        )
    return None


def find_initial(
    settings: CheckpointConfig, *, folder: Path, group: dist.ProcessGroup
) -> tuple[Path, CheckpointConfig]:
    """Return the local path that `initial_load_path` names, and the settings to read it with.

    The step that a URL names is downloaded into `folder`.
    """
    assert settings.initial_load_path is not None
    if not is_url(settings.initial_load_path):
        return Path(settings.initial_load_path), settings
    from torchtitan.checkpoint.remote import RemoteCheckpoints

    url, number = settings.initial_load_path.rstrip("/"), settings.load_step
    if (step := step_of(PurePosixPath(url))) is not None:
        url, number = url.rpartition("/")[0], step
    remote = RemoteCheckpoints(
        url, key=INITIAL_PATH, settings=settings, folder=folder / FETCHED, group=group
    )
    return remote.fetch(number), replace(settings, load_step=-1)


def open_step(
    path: Path,
    *,
    settings: CheckpointConfig,
    spec: ModelSpec,
    rope_heads: HeadsOf,
    filter: ParameterFilter,
    group: dist.ProcessGroup,
) -> WeightSource:
    """Open a checkpoint of this library, or a DCP folder.

    `rope_heads` returns the heads of a parameter that may be stored in the half-split
    order, else None. Raises CheckpointError if it does not exist, is damaged, or its order of rows
    is unknown.
    """
    step, is_ours = resolve_step(
        path,
        subfolder=settings.local_folder,
        load_step=settings.load_step,
        verifies=settings.verify_on_load,
        group=group,
    )
    weights, setting = step / "model" if is_ours else step, settings.initial_load_rope
    order = on_first_rank(lambda: find_row_order(weights, setting=setting, spec=spec), group=group)
    if is_ours:
        return Checkpoint(path=step, filter=filter, group=group)
    logger.info("%s has no checksums and no sizes: the sizes of model.flavor are used", step)
    heads: HeadsOf = rope_heads if order != "interleaved" else lambda name: None
    return DCPFolder(path=step, rope_heads=heads, filter=filter, group=group)
