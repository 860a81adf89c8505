"""Which checkpoint a path means.

`resolve_step` finds the checkpoint that `initial_load_path`, or the `--checkpoint` of a tool,
names. `newest_valid_step` finds the newest valid checkpoint of a folder, with which a run resumes.

A step that the user names is used or is an error. Among several steps, a damaged one is skipped for
the step before it. A folder without our checksums is used only if the user names it.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import MANIFEST, summarize, verify
from torchtitan.checkpoint.storage import METADATA, list_steps, recover_commits
from torchtitan.mesh.ranks import on_first_rank

logger = logging.getLogger(__name__)


def resolve_step(
    path: Path,
    *,
    subfolder: str,
    load_step: int = -1,
    verifies: bool,
    group: dist.ProcessGroup | None,
) -> tuple[Path, bool]:
    """Return the checkpoint that `path` means, and whether this library wrote it.

    Args:
        path: Folder of a step, of checkpoints (the newest valid one is used), of a run, or of a
            DCP checkpoint of another writer.
        subfolder: Folder of the checkpoints inside a run's folder.
        load_step: Step to use. -1: the newest.
        verifies: Whether to compare checksums.
        group: Ranks that ask together. None: this process only.

    Raises:
        CheckpointError: No valid checkpoint exists, or the named step is damaged.
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
            f"checkpoint.load_step {load_step} must be a step of initial_load_path, a run's folder "
            f"or a folder of checkpoints, and {path} has no such step"
        )
    for folder in folders:
        newest = newest_valid_step(folder, verifies=verifies, group=group)
        if newest is not None:
            return newest, True
    raise CheckpointError(
        f"a checkpoint must be the folder of a step, of checkpoints or of a run, and {path} holds "
        f"none"
    )


def newest_valid_step(
    folder: Path, *, verifies: bool, group: dist.ProcessGroup | None, recovers: bool = False
) -> Path | None:
    """Return the newest valid checkpoint, the same on every rank. None if `folder` is empty.

    Each newer checkpoint that is damaged or incomplete is logged.

    Args:
        folder: Parent of the `step-N` folders.
        verifies: Whether to compare checksums, or only to look for the manifest.
        group: Ranks that ask together. None: this process only.
        recovers: Whether to commit complete drafts first. Only for the run that owns the folder:
            another run may be writing them.

    Raises:
        CheckpointError: No checkpoint is valid.
    """

    def look() -> list[tuple[int, bool]]:
        if recovers:
            recover_commits(folder)
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
            logger.warning("%s is damaged and is not used: %s", path, summarize(mistakes))
    if steps:
        raise CheckpointError(
            f"none of {len(steps)} checkpoints in {folder} is valid, the newest is step "
            f"{steps[-1][0]}; restore one from a copy, or move them away to start from scratch. "
            f"Steps of other programs have no checksums: name the folder of one"
        )
    return None


def _refuse_damaged(step: Path, *, group: dist.ProcessGroup | None) -> None:
    """Raise CheckpointError if a checkpoint that the user named is damaged."""
    if mistakes := verify(step, group=group):
        raise CheckpointError(
            f"{step} is damaged: {summarize(mistakes)}; name another step, or skip the check: "
            f"checkpoint.verify_on_load = false (--skip_verify of a script)"
        )


def _is_plain_dcp(path: Path) -> bool:
    """Return whether another writer made this DCP folder: it lacks our manifest."""
    return (path / METADATA).is_file() and not (path / MANIFEST).is_file()
