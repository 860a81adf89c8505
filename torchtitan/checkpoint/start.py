"""From which checkpoint a run starts, and what it takes from it.

People come back to a checkpoint with one of three intentions, and a trainer that guesses which one
gets two of them wrong. So `checkpoint.mode` names it:

recover    the very same run: everything, and a setting that shapes the training may not differ
continue   the same weights, optimizer and data position, under other settings
finetune   the weights alone, as the beginning of a new run

A checkpoint in the run's own folder always comes first, and one that this very job saved is always
recovered whole: a job that was killed is started again with the command that started it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.files import Content
from torchtitan.checkpoint.hf import HeadDim
from torchtitan.checkpoint.hf_folder import HFFolder
from torchtitan.checkpoint.settings import WEIGHT_FILES, CheckpointConfig
from torchtitan.checkpoint.source import checked_step, find_source, is_plain_dcp, newest_step
from torchtitan.mesh.dims import ParallelDims

logger = logging.getLogger(__name__)
Intention = Literal["recover", "continue", "finetune"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """What to load, and with which intention."""

    source: Path
    """Folder of the step."""
    intention: Intention
    exclude: tuple[str, ...] = ()
    """Components and parameter patterns that are not loaded."""
    differences: tuple[str, ...] = ()
    """Settings that shape the training and are not those of the checkpoint."""
    is_plain: bool = False
    """Whether the source is a DCP folder of another writer, without our manifest."""
    in_halves: HeadDim = lambda name: None
    """Of a plain folder: the parameters whose rows lie in halves there."""
    hf: HFFolder | None = None
    """The source, where it is a folder of Hugging Face, or a single file."""
    grows_vocab: bool = False
    """Whether the source may have a smaller vocabulary than the model."""
    left_out_before: tuple[str, ...] = ()
    """What the job that saved the source had left out already, so that it is in the source now."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The job beside the one that saved a checkpoint."""

    differences: tuple[str, ...]
    """Settings that shape the training and differ, one line each."""
    same_loading: bool
    """Whether that job was also told to load the same way."""
    same_exclusion: bool
    """Whether that job was told to leave out the same."""
    load_step: int
    """The step that that job was told to go back to; -1: none."""

    @property
    def is_same_job(self) -> bool:
        """Whether that job was this one, as far as the training goes."""
        return self.same_loading and not self.differences


Compare = Callable[[Content], Comparison]
"""From a checkpoint's manifest to the comparison with this job."""
OpenHF = Callable[[Path], HFFolder]
"""From a path to the folder of Hugging Face there, or the file, if its weights are this model's."""
OpenPlain = Callable[[Path], HeadDim]
"""From a plain DCP folder to the parameters whose rows lie in halves there."""


def stored_layout(manifest: Mapping[str, Any]) -> ParallelDims:
    """Return the layout of the ranks that saved a checkpoint.

    Raises:
        CheckpointError: The manifest names axes or degrees that are none.
    """
    layout = manifest["layout"]
    known = {axis.name for axis in fields(ParallelDims)}
    if not known.issuperset(layout) or not all(type(n) is int for n in layout.values()):
        raise CheckpointError(
            f"a {storage.MANIFEST} must give the layout by {', '.join(sorted(known))}, got "
            f"{layout}; use another checkpoint, or the version that wrote this one"
        )
    return ParallelDims(**layout)


def choose_start(
    settings: CheckpointConfig,
    *,
    folder: Path,
    compare: Compare,
    open_hf: OpenHF,
    open_plain: OpenPlain,
    group: dist.ProcessGroup,
) -> Start | None:
    """Return what the run with its checkpoints in `folder` starts from; None: from nothing.

    Raises:
        CheckpointError: What was asked for is not there, or the mode does not allow what differs.
    """
    own = _own_checkpoint(settings, folder=folder, compare=compare, group=group)
    if own is not None:
        if settings.initial_load_path is not None:
            logger.info(
                "checkpoint.initial_load_path is not read: %s, of this run itself, comes first", own
            )
        return _start_from_own(settings, own, comparison=_compared(own, compare, group=group))
    if settings.initial_load_path is not None:
        path = Path(settings.initial_load_path)
        if settings.initial_load_in_hf or path.suffix in WEIGHT_FILES:
            return _start_from_weights(settings, path, hf=open_hf(path))
        source = find_source(path, settings=settings, group=group)
        intention: Intention = "finetune" if settings.initial_load_model_only else settings.mode
        is_plain = storage.on_first_rank(lambda: is_plain_dcp(source), group=group)
        if is_plain and intention == "finetune":
            return replace(
                _start_from_weights(settings, source), is_plain=True, in_halves=open_plain(source)
            )
        if settings.initial_load_rope != "auto" and not is_plain:
            raise CheckpointError(
                f"checkpoint.initial_load_rope is for weights of other writers, and {source} is of "
                f"this library, which knows the order of its rows; remove it"
            )
        if intention == "finetune":
            return _start_from_weights(settings, source)
        if is_plain:
            raise CheckpointError(
                f"{source} has no {storage.MANIFEST}: another trainer wrote it, and its weights "
                f"alone can be taken; write checkpoint.initial_load_model_only = true, with mode "
                f'"finetune" or without a mode'
            )
        return _start_from(settings, source, comparison=_compared(source, compare, group=group))
    if settings.mode == "continue":
        raise CheckpointError(
            f'checkpoint.mode = "continue" needs a checkpoint, {folder} holds none; name one by '
            f'checkpoint.initial_load_path, or write mode = "recover" to start from nothing'
        )
    return None


def _start_from_weights(
    settings: CheckpointConfig, source: Path, *, hf: HFFolder | None = None
) -> Start:
    return Start(
        source=source,
        intention="finetune",
        exclude=settings.exclude_from_loading,
        grows_vocab=settings.grow_vocab,
        hf=hf,
    )


def _compared(source: Path, compare: Compare, *, group: dist.ProcessGroup) -> Comparison:
    return compare(storage.on_first_rank(lambda: storage.read_manifest(source), group=group))


def _start_from_own(settings: CheckpointConfig, own: Path, *, comparison: Comparison) -> Start:
    continues = settings.mode == "continue"
    before = settings.exclude_from_loading if continues and comparison.same_exclusion else ()
    if comparison.is_same_job:
        return Start(source=own, intention="recover", left_out_before=before)
    if before:
        # what began anew then is trained now: to leave it out again would throw that away
        logger.info(
            "checkpoint.exclude_from_loading is not applied again: %s was saved by a job that had "
            "left out the same",
            own,
        )
        start = _start_from(settings, own, comparison=comparison)
        return replace(start, exclude=(), left_out_before=before)
    if continues and "train_state" in settings.exclude_from_loading:
        raise CheckpointError(
            f'checkpoint.exclude_from_loading with "train_state" starts at step 0, beside {own}, '
            f"which would stay the newest; name it by checkpoint.initial_load_path and choose "
            f"another job.dump_folder"
        )
    return _start_from(settings, own, comparison=comparison)


def _start_from(settings: CheckpointConfig, source: Path, *, comparison: Comparison) -> Start:
    if settings.mode == "continue":
        return Start(
            source=source,
            intention="continue",
            exclude=settings.exclude_from_loading,
            differences=comparison.differences,
        )
    refuse_differences(source, comparison.differences)
    return Start(source=source, intention="recover")


def refuse_differences(
    place: Path, differences: tuple[str, ...], *, has_checkpoint: bool = True
) -> None:
    """Raise CheckpointError with the settings that make this job another training, if any.

    `has_checkpoint`: whether `place` is or has a checkpoint that a job could go on from.
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


def _own_checkpoint(
    settings: CheckpointConfig, *, folder: Path, compare: Compare, group: dist.ProcessGroup
) -> Path | None:
    """Return the newest whole step of the run's own, which `load_step` may name but not pass over.

    A job that was killed is started again by the same command: a newer step that a job with the
    same `load_step` saved is its own.
    """
    wanted, verify = settings.load_step, settings.verify_on_load
    newest = newest_step(folder, verify=verify, group=group, finish=True)
    chooses = wanted != -1 and settings.initial_load_path is None
    if not chooses or (newest is not None and newest.name == f"step-{wanted}"):
        return newest
    steps = storage.on_first_rank(lambda: storage.find_steps(folder), group=group)
    is_later = newest is not None and int(newest.name.removeprefix("step-")) > wanted
    if (
        newest is not None
        and is_later
        and _compared(newest, compare, group=group).load_step == wanted
    ):
        return newest
    if wanted not in steps:
        raise CheckpointError(
            f"checkpoint.load_step {wanted} is not in {folder}; it holds {steps or 'no checkpoint'}"
        )
    if is_later:
        raise CheckpointError(
            f"checkpoint.load_step must be the newest step of {folder}, {newest}, got {wanted}: a "
            f"run never goes back in its own folder. Go back in a new one: another "
            f"--job.dump_folder, with --checkpoint.initial_load_path {folder} "
            f"--checkpoint.initial_load_model_only false --checkpoint.load_step {wanted}"
        )
    return checked_step(folder / f"step-{wanted}", verify=verify, group=group)
