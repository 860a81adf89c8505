"""From which checkpoint a run starts, and what it takes from it.

People come back to a checkpoint with one of three intentions, and a trainer that guesses gets two
of them wrong. So `checkpoint.mode` names it:

recover    the very same run: everything, and settings that shape the training may not differ
continue   the same weights, optimizer and data position, under other settings
finetune   only the weights, as the beginning of a new run

A checkpoint in the run's own folder comes first, and one that this very job saved is always
recovered whole: a job that was killed is started again with the command that started it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import Content
from torchtitan.checkpoint.folders import MANIFEST
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.source import Selection, Step, WeightSource
from torchtitan.checkpoint.steps import own_step
from torchtitan.mesh.dims import ParallelDims

logger = logging.getLogger(__name__)
Intention = Literal["recover", "continue", "finetune"]
Whose = Literal["same job", "own folder", "other folder", "foreign"]
"""A checkpoint in the run's folder, of this very job or of one with other settings; a step of ours
elsewhere; weights that this library has not saved."""
COMES_TO: Mapping[tuple[Whose, Intention], Intention | None] = {
    ("same job", "recover"): "recover",
    ("same job", "continue"): "recover",
    ("same job", "finetune"): "recover",
    ("own folder", "recover"): "recover",
    ("own folder", "continue"): "continue",
    ("own folder", "finetune"): "recover",
    ("other folder", "recover"): "recover",
    ("other folder", "continue"): "continue",
    ("other folder", "finetune"): "finetune",
    ("foreign", "recover"): None,
    ("foreign", "continue"): None,
    ("foreign", "finetune"): "finetune",
}
"""What is done by whose checkpoint it is and what is asked for; None: refused."""


@dataclass(frozen=True, kw_only=True)
class Start:
    """What to load, and with which intention."""

    source: WeightSource
    intention: Intention
    exclude: tuple[str, ...] = ()
    """Components and patterns of parameters that are not loaded."""
    differences: tuple[str, ...] = ()
    """Settings that shape the training and are not those of the checkpoint."""
    left_out_before: tuple[str, ...] = ()
    """What the job that saved the source had left out already, so that it is in the source now."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """This job beside the one that saved a checkpoint."""

    differences: tuple[str, ...]
    """Settings that shape the training and differ, one line each."""
    then: CheckpointConfig
    """What that job was told to load."""


Compare = Callable[[Content], Comparison]
"""From a checkpoint's manifest to the comparison with this job."""
OpenSource = Callable[[Intention], WeightSource]
"""Opens what initial_load_path names, to take from it what is asked for."""


def stored_layout(manifest: Mapping[str, Any]) -> ParallelDims:
    """Return the layout of the ranks that saved a checkpoint."""
    layout = manifest["layout"]
    known = {axis.name for axis in fields(ParallelDims)}
    if not known.issuperset(layout) or not all(
        type(n) is int and 0 < n < 2**31 for n in layout.values()
    ):
        raise CheckpointError(
            f"a {MANIFEST} must give the layout by {', '.join(sorted(known))}, got "
            f"{layout}; use another checkpoint, or the version that wrote this one"
        )
    return ParallelDims(**layout)


def choose_start(
    settings: CheckpointConfig,
    *,
    folder: Path,
    compare: Compare,
    open_source: OpenSource,
    group: dist.ProcessGroup,
) -> Start | None:
    """Return what the run with its checkpoints in `folder` starts from; None: from nothing.

    Raises:
        CheckpointError: What was asked for is not there, or the mode does not allow what differs.
    """

    def compared(step: Path) -> Comparison:
        return compare(Step(path=step, group=group).manifest)

    own = own_step(
        folder,
        load_step=settings.load_step,
        may_be_elsewhere=settings.initial_load_path is not None,
        asked_for=lambda step: compared(step).then.load_step,
        verifies=settings.verify_on_load,
        group=group,
    )
    if own is not None:
        if settings.initial_load_path is not None:
            logger.info(
                "checkpoint.initial_load_path is not read: %s, of this run itself, comes first", own
            )
        return _start_from_own(settings, own, comparison=compared(own), group=group)
    if settings.initial_load_path is None:
        if settings.mode == "continue":
            raise CheckpointError(
                f'checkpoint.mode = "continue" needs a checkpoint, {folder} holds none; name one '
                f'by checkpoint.initial_load_path, or write mode = "recover" to start from nothing'
            )
        return None
    asked: Intention = "finetune" if settings.initial_load_model_only else settings.mode
    source = open_source(asked)
    intention = COMES_TO["other folder" if isinstance(source, Step) else "foreign", asked]
    if intention is None:
        raise CheckpointError(
            f"{source.path} has no {MANIFEST}: another trainer wrote it, and only its "
            f"weights can be taken; write checkpoint.initial_load_model_only = true, with mode "
            f'"finetune" or without a mode'
        )
    differences: tuple[str, ...] = ()
    if intention != "finetune":
        differences = compared(source.path).differences
    if intention == "recover":
        refuse_differences(source.path, differences)
    exclude = () if intention == "recover" else settings.exclude_from_loading
    return Start(source=source, intention=intention, exclude=exclude, differences=differences)


def _start_from_own(
    settings: CheckpointConfig, own: Path, *, comparison: Comparison, group: dist.ProcessGroup
) -> Start:
    then = comparison.then
    same_exclusion = then.exclude_from_loading == settings.exclude_from_loading
    is_same = then.mode == settings.mode and same_exclusion and not comparison.differences
    whose: Whose = "same job" if is_same else "own folder"
    intention = COMES_TO[whose, settings.mode]
    assert intention is not None
    exclude = settings.exclude_from_loading if settings.mode == "continue" else ()
    before = exclude if same_exclusion else ()
    if intention == "recover":
        refuse_differences(own, comparison.differences)
        exclude = ()
    elif before:
        # what began anew then is trained now: to leave it out again would throw that away
        logger.info(
            "checkpoint.exclude_from_loading is not applied again: %s was saved by a job that had "
            "left out the same",
            own,
        )
        exclude = ()
    elif "train_state" in exclude:
        raise CheckpointError(
            f'checkpoint.exclude_from_loading with "train_state" starts at step 0, beside {own}, '
            f"which would stay the newest; name it by checkpoint.initial_load_path and choose "
            f"another job.dump_folder"
        )
    return Start(
        source=Step(path=own, group=group, selection=Selection(exclude=exclude)),
        intention=intention,
        exclude=exclude,
        differences=comparison.differences if intention == "continue" else (),
        left_out_before=before,
    )


def refuse_differences(
    place: Path, differences: tuple[str, ...], *, has_checkpoint: bool = True
) -> None:
    """Raise CheckpointError with the settings that make this job another training, if any.

    `has_checkpoint`: whether `place` is or has a checkpoint that a job could continue.
    """
    if not differences:
        return
    ways = "restore these settings to recover that run; or go on from its checkpoint with the new "
    ways += "ones: --checkpoint.mode continue (or finetune with initial_load_path: weights alone); "
    if not has_checkpoint:
        ways = "it holds results but no checkpoint to go on from: restore these settings; "
    raise CheckpointError(
        f"{place} was made by a job with other settings:\n  "
        + "\n  ".join(differences)
        + f"\n{ways}or choose another --job.dump_folder to begin a new run"
    )
