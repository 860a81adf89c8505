"""Which checkpoint a run starts from, and which components it loads.

`checkpoint.mode` names the purpose of loading a checkpoint:

recover    resume the same run: load everything; settings that shape the training may not differ
continue   keep weights, optimizer, step and data position, with other settings
finetune   load only the weights and start at step 0

A checkpoint in the run's own folder takes precedence over `initial_load_path`, and one that this
very job saved is always recovered: running the command of a killed job again resumes it. In the
own folder recover acts as continue if a finished run is asked only for more steps, or if
`exclude_from_loading` is given.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.base.stored_json import StoredJSON
from torchtitan.checkpoint.checksums import MANIFEST
from torchtitan.checkpoint.manager import CheckpointIO
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import Checkpoint, ParameterFilter, WeightSource
from torchtitan.checkpoint.steps import newest_valid_step
from torchtitan.checkpoint.storage import find_steps
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.ranks import on_first_rank

logger = logging.getLogger(__name__)
LoadMode = Literal["recover", "continue", "finetune"]
SourceKind = Literal["own folder", "other folder", "weights"]
"""A checkpoint in the run's folder, a checkpoint of this library elsewhere, or weights that another
program saved."""
EFFECTIVE_MODE: Mapping[tuple[SourceKind, LoadMode], LoadMode] = {
    ("own folder", "recover"): "recover",
    ("own folder", "continue"): "continue",
    ("own folder", "finetune"): "recover",
    ("other folder", "recover"): "recover",
    ("other folder", "continue"): "continue",
    ("other folder", "finetune"): "finetune",
    ("weights", "finetune"): "finetune",
}
"""Mode by the kind of the source and the requested mode. A pair that is missing is refused."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """A checkpoint or other weights to load, and how."""

    source: WeightSource
    mode: LoadMode
    exclude: tuple[str, ...] = ()
    """Components and patterns of parameters that are not loaded."""
    differences: tuple[str, ...] = ()
    """Settings that shape the training and differ from the checkpoint's."""
    already_excluded: tuple[str, ...] = ()
    """Exclusions of the job that saved the source. What they reset is part of the source now."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """Comparison of this job with the one that saved a checkpoint."""

    differences: tuple[str, ...]
    """Settings that shape the training and differ, a line each."""
    then: CheckpointConfig
    """The [checkpoint] section of that job."""
    is_longer: bool = False
    """Whether that job had reached its last step, and this one only has more of them."""


Compare = Callable[[StoredJSON], Comparison]
"""Compares this job with a checkpoint's manifest."""
CompareResults = Callable[[], tuple[str, ...]]
"""Returns how this job differs from the one that wrote the run's folder, a line per setting."""
OpenInitial = Callable[[LoadMode], WeightSource]
"""Opens `initial_load_path` for a requested mode."""


def stored_layout(manifest: Mapping[str, Any]) -> ParallelDims:
    """Return the layout of the ranks that saved a checkpoint."""
    layout = manifest["layout"]
    known = {axis.name for axis in fields(ParallelDims)}
    if not known.issuperset(layout) or not all(
        type(n) is int and 0 < n < 2**31 for n in layout.values()
    ):
        raise CheckpointError(
            f"{MANIFEST}: layout must have the degrees {', '.join(sorted(known))}, got {layout}; "
            f"use another checkpoint"
        )
    return ParallelDims(**layout)


def find_start(
    settings: CheckpointConfig,
    *,
    run_folder: Path,
    io: CheckpointIO | None,
    compare: Compare,
    compare_results: CompareResults,
    open_initial: OpenInitial,
) -> Start | None:
    """Return what the run starts from, or None for the initial weights. Collective.

    A folder belongs to one training, which its checkpoints and its settings identify. A job whose
    settings shape another training is refused before it writes there.

    Args:
        settings: The [checkpoint] section.
        run_folder: The folder of the run, which this job has locked.
        io: What ranks load through. None if nothing is saved or loaded.
        compare: Compares this job with a checkpoint's manifest.
        compare_results: Compares this job with the settings in `run_folder`.
        open_initial: Opens `initial_load_path`.

    Raises:
        CheckpointError: A requested checkpoint does not exist, or settings differ from those
            of the checkpoint, or of results without one.
    """
    start, folder = None, run_folder / settings.local_folder
    if io is not None:
        if io.remote is not None:
            io.remote.pull_newest()
            settings = replace(settings, verify_on_load=False)  # it was done
        start = choose_start(
            settings, folder=folder, compare=compare, open_initial=open_initial, group=io.group
        )
    everyone = dist.group.WORLD if io is None else io.group
    # one rank looks: a listing by each is slow on shared disks
    has_rows, has_steps = on_first_rank(
        lambda: (
            any(path.stat().st_size for path in run_folder.glob("metrics*.jsonl")),
            bool(find_steps(folder)),
        ),
        group=everyone,
    )
    is_resumed = settings.enable and start is not None and start.source.path.parent == folder
    if (has_rows or has_steps) and not is_resumed:
        refuse_differences(run_folder, compare_results(), has_checkpoint=has_steps)
    dist.barrier()  # no rank writes before every rank has looked
    return start


def choose_start(
    settings: CheckpointConfig,
    *,
    folder: Path,
    compare: Compare,
    open_initial: OpenInitial,
    group: dist.ProcessGroup,
) -> Start | None:
    """Return what the run starts from, or None for the initial weights.

    Args:
        settings: The [checkpoint] section.
        folder: Parent of the run's own `step-N` folders.
        compare: Compares this job with a checkpoint's manifest.
        open_initial: Opens `initial_load_path`.
        group: All ranks.

    Raises:
        CheckpointError: The checkpoint does not exist, or its mode forbids the differences.
    """

    def compared(step: Path) -> Comparison:
        return compare(Checkpoint(path=step, group=group).manifest)

    own = None
    if settings.enable:
        own = newest_valid_step(
            folder, verifies=settings.verify_on_load, group=group, recovers=True
        )
    if own is not None:
        comparison = compared(own)
        if settings.load_step not in (-1, comparison.then.load_step):
            raise CheckpointError(
                f"checkpoint.load_step {settings.load_step} cannot be loaded: {own}, of this run, "
                f"takes precedence; choose another --job.dump_folder"
            )
        if settings.initial_load_path is not None:
            logger.info(
                "checkpoint.initial_load_path is not read: %s, of this run, takes precedence", own
            )
        return _start_from_own(settings, own, comparison=comparison, group=group)
    if settings.initial_load_path is None:
        if settings.mode == "continue":
            raise CheckpointError(
                f'checkpoint.mode = "continue" needs a checkpoint, and {folder} has none; set '
                f'checkpoint.initial_load_path, or mode = "recover" to start from scratch'
            )
        if settings.exclude_from_loading:
            raise CheckpointError(
                f"checkpoint.exclude_from_loading needs a checkpoint, and {folder} has none; set "
                f"checkpoint.initial_load_path, or remove it to start from scratch"
            )
        return None
    return _start_from_elsewhere(settings, compared=compared, open_initial=open_initial)


def _start_from_elsewhere(
    settings: CheckpointConfig, *, compared: Callable[[Path], Comparison], open_initial: OpenInitial
) -> Start:
    if settings.mode == "continue" and settings.initial_load_model_only:
        raise CheckpointError(
            'checkpoint.mode = "continue" takes optimizer and data position too, but '
            "checkpoint.initial_load_model_only is true and this run has no checkpoint of its own; "
            'set it false, or write mode = "finetune" to load only the weights'
        )
    requested: LoadMode = "finetune" if settings.initial_load_model_only else settings.mode
    source = open_initial(requested)
    is_checkpoint = isinstance(source, Checkpoint)
    mode = EFFECTIVE_MODE.get(("other folder" if is_checkpoint else "weights", requested))
    if mode is None:
        raise CheckpointError(
            f"{source.path} has no {MANIFEST}: another program wrote it, and only its weights can "
            f'be loaded; write checkpoint.initial_load_model_only = true, with mode "finetune" or '
            f"without a mode"
        )
    differences: tuple[str, ...] = ()
    if mode != "finetune":
        differences = compared(source.path).differences
    if mode == "recover":
        refuse_differences(source.path, differences)
    exclude = () if mode == "recover" else settings.exclude_from_loading
    return Start(source=source, mode=mode, exclude=exclude, differences=differences)


def _start_from_own(
    settings: CheckpointConfig, own: Path, *, comparison: Comparison, group: dist.ProcessGroup
) -> Start:
    then = comparison.then
    has_same_exclusions = then.exclude_from_loading == settings.exclude_from_loading
    is_same_job = then.mode == settings.mode and has_same_exclusions and not comparison.differences
    requested = settings.mode
    if requested == "recover" and (comparison.is_longer or settings.exclude_from_loading):
        requested = "continue"
    mode = "recover" if is_same_job else EFFECTIVE_MODE["own folder", requested]
    if settings.mode == "recover" and has_same_exclusions and not comparison.is_longer:
        refuse_differences(own, comparison.differences)
    exclude = settings.exclude_from_loading if requested == "continue" else ()
    already_excluded = exclude if has_same_exclusions else ()
    if mode == "recover":
        refuse_differences(own, comparison.differences)
        exclude = ()
    elif already_excluded:
        # what they reset has been trained since; resetting it again would lose that
        logger.info(
            "checkpoint.exclude_from_loading was applied before %s was saved, and is not again", own
        )
        exclude = ()
    elif "train_state" in exclude:
        raise CheckpointError(
            f'checkpoint.exclude_from_loading with "train_state" restarts at step 0, but {own} '
            f"would stay the newest step; set checkpoint.initial_load_path to it and choose "
            f"another job.dump_folder"
        )
    return Start(
        source=Checkpoint(path=own, group=group, filter=ParameterFilter(exclude=exclude)),
        mode=mode,
        exclude=exclude,
        differences=comparison.differences if mode == "continue" else (),
        already_excluded=already_excluded,
    )


def refuse_differences(
    place: Path, differences: tuple[str, ...], *, has_checkpoint: bool = True
) -> None:
    """Raise CheckpointError if settings make this job another training.

    Args:
        place: Checkpoint or run folder of the other job.
        differences: Settings that differ, a line each.
        has_checkpoint: Whether `place` has a checkpoint from which a job could continue.
    """
    if not differences:
        return
    if has_checkpoint:
        ways = (
            "restore these settings to recover that run; or continue from its checkpoint with the "
            "new ones: --checkpoint.mode continue (or finetune with initial_load_path: only the "
            "weights)"
        )
    else:
        ways = "it has no checkpoint: restore these settings"
    raise CheckpointError(
        f"{place} was made by a job with other settings:\n  "
        + "\n  ".join(differences)
        + f"\n{ways}; or choose another --job.dump_folder to start a new run"
    )
