"""A run's `step-N` folders: the names that come and go while one is written or removed.

    .step-N.tmp       a draft; with a manifest it is complete, and only lacks its name
    step-N            a checkpoint
    .step-N.deleted   on its way out
    .step-N.aside     passed over as damaged by a run that went on from an earlier step

Each passes to the next by a rename, so that at every instant a folder is one of these. A process
may be killed between any two lines: `finish_commits` does what it still had to do. What cannot be
removed is warned of and stays: a run must not end over rubbish. So a name may be taken already, and
the second `.step-N.deleted` is `.step-N.deleted-2`."""

from __future__ import annotations

import logging
import re
import shutil
from itertools import count
from pathlib import Path, PurePath

from torchtitan.checkpoint.files import seal_is_whole, sync_folder

MANIFEST = "manifest.json"
STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_PASSING = re.compile(r"\.step-[0-9]+\.(tmp|deleted(-[0-9]+)?)")
logger = logging.getLogger(__name__)


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the committed checkpoints in `folder`, ascending."""
    return [step for step, has_manifest in list_steps(folder) if has_manifest]


def list_steps(folder: Path) -> list[tuple[int, bool]]:
    """Return the step of every `step-N` folder, ascending, and whether it has a manifest."""
    if not folder.is_dir():
        return []
    matches = ((STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(m[1]), _has_manifest(path)) for m, path in matches if m)


def step_of(checkpoint: PurePath) -> int | None:
    """Return the step of a folder by its name; None: it is not named for one."""
    match = STEP_NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def _has_manifest(checkpoint: Path) -> bool:
    try:
        return (checkpoint / MANIFEST).is_file()
    except OSError:  # damaged or not ours to read: no reason to pass over the others
        return False


def draft_of(target: Path) -> Path:
    """Return the name under which a checkpoint is written."""
    return target.with_name(f".{target.name}.tmp")


def make_draft(target: Path, components: list[str]) -> None:
    """Make an empty draft with a folder for each component, and clear away what dead saves left."""
    finish_commits(target.parent)
    if target.parent.is_dir():
        for path in target.parent.iterdir():
            if _PASSING.fullmatch(path.name):
                _remove(path)
    for name in components:
        (draft_of(target) / name).mkdir(parents=True)


def commit(target: Path) -> None:
    """Make the draft the checkpoint, in the place of one of the same name."""
    draft = draft_of(target)
    for folder in [*(path for path in draft.iterdir() if path.is_dir()), draft]:
        sync_folder(folder)
    trash = None
    if target.exists():  # saved by an earlier start that died right after, or by another setting
        trash = target.rename(_free_name(target, "deleted"))
    try:
        draft.rename(target)
    except OSError:
        if trash is not None:
            trash.rename(target)
        raise
    sync_folder(target.parent)
    for old in target.parent.glob(f".{target.name}.deleted*"):
        _remove(old)


def finish_commits(folder: Path) -> None:
    """Give complete drafts their name, where a process was killed right before it did."""
    if not folder.is_dir():
        return
    for draft in folder.glob(".step-*.tmp"):
        target = draft.with_name(draft.name.removeprefix(".").removesuffix(".tmp"))
        manifest = draft / MANIFEST
        if step_of(target) is None:
            continue
        try:
            is_complete = manifest.is_file() and seal_is_whole(manifest) and not target.exists()
        except OSError as error:
            logger.warning("%s is not taken for complete: %s", draft, error)
            continue
        if is_complete:
            commit(target)


def delete(checkpoint: Path) -> None:
    """Remove a checkpoint, its name first, so that no half of it can be taken for whole.

    What cannot be removed is warned of: the checkpoints that matter are there.
    """
    try:
        trash = checkpoint.rename(_free_name(checkpoint, "deleted"))
    except OSError as error:
        logger.warning("%s is older than what is kept, but stays: %s", checkpoint, error)
    else:
        _remove(trash)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be removed, and is tried again later: %s", path, error)


def set_aside_after(folder: Path, step: int, *, but: int) -> list[Path]:
    """Take every checkpoint of a later step, whole or not, out of the row of steps, without
    deleting it, `but` one; return the new names."""
    later = [folder / f"step-{n}" for n, _ in list_steps(folder) if n > step and n != but]
    return [checkpoint.rename(_free_name(checkpoint, "aside")) for checkpoint in later]


def _free_name(checkpoint: Path, ending: str) -> Path:
    first = checkpoint.with_name(f".{checkpoint.name}.{ending}")
    names = (first.with_name(f"{first.name}-{number}") for number in count(2))
    return first if not first.exists() else next(name for name in names if not name.exists())
