"""Which step a path means.

Three questions have their answer here. What does `initial_load_path`, or `--checkpoint` of a
script, name (`find_step`)? Which step is the newest whole one of a folder (`newest_step`)? With
which one does a run go on in its own folder (`own_step`)?

A step that was named is that step or an error. Among several, a damaged one is passed over for the
one before it. A folder without our checksums is only taken by its own name.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.folders import MANIFEST, find_steps, finish_commits, list_steps
from torchtitan.checkpoint.metadata import METADATA
from torchtitan.checkpoint.ranks import on_first_rank
from torchtitan.checkpoint.verify import summary, verify

logger = logging.getLogger(__name__)


def find_step(
    path: Path,
    *,
    subfolder: str,
    load_step: int = -1,
    verifies: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Path, bool]:
    """Return the folder that `path` means, and whether it is ours: a step of ours, itself or the
    newest whole one of a checkpoint folder or a run; or the DCP folder of another writer.

    `subfolder`: where a run has its checkpoints. `load_step` names one among several; -1: none.

    Raises:
        CheckpointError: There is no whole checkpoint, or the step that was named is damaged.
    """
    folders = (path, path / subfolder)
    if load_step != -1:
        named = [folder / f"step-{load_step}" for folder in folders]
    else:
        named = [path, path.parent] if path.name == "model" else [path]

    def look() -> tuple[Path, bool] | None:
        ours = [(step, True) for step in named if (step / MANIFEST).is_file()]
        return next(iter([*ours, *((step, False) for step in named if _is_plain_dcp(step))]), None)

    found = on_first_rank(look, group=group)
    if found is not None:
        step, is_ours = found
        if is_ours and verifies:
            _refuse_damaged(step, group=group)
        if not is_ours:
            logger.info("%s cannot be verified: it has no checksums", step)
        return found
    if load_step != -1:
        raise CheckpointError(
            f"checkpoint.load_step {load_step} is not in {path}: it must be a step of "
            f"initial_load_path, a run's folder or a folder of checkpoints; name another"
        )
    for folder in folders:
        plain = on_first_rank(partial(_plain_steps, folder), group=group)
        if plain:
            raise CheckpointError(
                f"{path} holds steps of another writer, without checksums to find the newest whole "
                f"one by; name one: {', '.join(plain)}"
            )
        newest = newest_step(folder, verifies=verifies, group=group)
        if newest is not None:
            return newest, True
    instead = on_first_rank(lambda: _found_instead(path, subfolder), group=group)
    raise CheckpointError(
        f"a checkpoint must be the folder of a step, of checkpoints or of a run, got {path}, which "
        f"{instead}"
    )


def newest_step(
    folder: Path, *, verifies: bool, group: dist.ProcessGroup | None, finish: bool = False
) -> Path | None:
    """Return the newest whole step of ours, the same on every rank; None if `folder` has no
    checkpoint.

    Each newer one that is damaged or partial is named in a warning. If it `verifies` not, only the
    presence of the manifest is looked at. `finish` gives complete drafts their name first: only for
    the folder's own run, since in that of another they may be written at this moment.

    Raises:
        CheckpointError: There are checkpoints, and none of them is whole.
    """

    def look() -> list[tuple[int, bool]]:
        if finish:
            finish_commits(folder)
        return list_steps(folder)

    steps = on_first_rank(look, group=group)
    for step, has_manifest in reversed(steps):
        path = folder / f"step-{step}"
        if verifies:
            mistakes = verify(path, group=group)
        else:
            mistakes = [] if has_manifest else [f"{MANIFEST} is missing"]
        if not mistakes:
            return path
        if group is None or dist.get_rank(group) == 0:
            logger.warning("%s is damaged and is not used: %s", path, summary(mistakes))
    if steps:
        raise CheckpointError(
            f"none of the {len(steps)} checkpoints in {folder} is whole, the newest is step "
            f"{steps[-1][0]}; restore one from a copy, or move them away to start anew"
        )
    return None


def own_step(
    folder: Path,
    *,
    load_step: int,
    may_be_elsewhere: bool,
    asked_for: Callable[[Path], int],
    verifies: bool,
    group: dist.ProcessGroup,
) -> Path | None:
    """Return the newest whole step of the run's own folder, the one that `load_step` may name
    there; None: there is nothing, and `load_step` `may_be_elsewhere`.

    A job that was killed is started again by the same command: steps that a job with the same
    `load_step` saved are its own. `asked_for` returns the one of the job that saved a step.

    Raises:
        CheckpointError: `load_step` is not there, or not the newest.
    """
    newest = newest_step(folder, verifies=verifies, group=group, finish=True)
    if load_step == -1 or (newest is None and may_be_elsewhere):
        return newest
    if newest is not None and asked_for(newest) == load_step:
        return newest
    steps = on_first_rank(lambda: find_steps(folder), group=group)
    named = folder / f"step-{load_step}"
    if load_step not in steps:
        raise CheckpointError(
            f"checkpoint.load_step {load_step} is not in {folder}; it holds "
            f"{steps or 'no checkpoint'}"
        )
    if newest is not None and load_step < int(newest.name.removeprefix("step-")):
        raise CheckpointError(
            f"checkpoint.load_step must be the newest step of {folder}, {newest}, got {load_step}: "
            f"a run never goes back in its own folder. Go back in a new one: another "
            f"--job.dump_folder, with --checkpoint.initial_load_path {folder} "
            f"--checkpoint.initial_load_model_only false --checkpoint.load_step {load_step}"
        )
    if named != newest:  # it was passed over
        _refuse_damaged(named, group=group)
    return named


def _refuse_damaged(step: Path, *, group: dist.ProcessGroup | None) -> None:
    """Raise CheckpointError if a step that was named, which no other may replace, is damaged."""
    if mistakes := verify(step, group=group):
        raise CheckpointError(
            f"{step}, asked for by name, is damaged: {summary(mistakes)}; name another step, or "
            f"read it as it is: checkpoint.verify_on_load = false (--skip_verify of a script)"
        )


def _is_plain_dcp(path: Path) -> bool:
    """Tell whether another writer made this DCP folder: it has no manifest of ours."""
    return (path / METADATA).is_file() and not (path / MANIFEST).is_file()


def _plain_steps(folder: Path) -> list[str]:
    """Return the newest step folders of another writer, where there is none of ours."""
    steps = list_steps(folder)
    if any(has_manifest for _, has_manifest in steps):
        return []
    paths = [folder / f"step-{step}" for step, _ in reversed(steps)]
    return [str(path) for path in paths if _is_plain_dcp(path)][:3]


def _found_instead(path: Path, subfolder: str) -> str:
    if not path.is_dir():
        return "is a file: name its folder" if path.exists() else "does not exist"
    runs = sorted(str(run.parent) for run in path.glob(f"*/{subfolder}") if run.is_dir())
    if runs:
        return f"holds runs; name one of them: {', '.join(runs[:8])}"
    return "holds no whole checkpoint; train with --checkpoint.enable to make one"
