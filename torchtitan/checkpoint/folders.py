"""A run's `step-N` folders: the names that come and go while one is written or removed.

    .step-N.tmp       a draft; with a manifest it is complete, and only lacks its name
    step-N            a checkpoint
    .step-N.deleted   on its way out
    .step-N.aside     left behind by a run that went back to an earlier step; for a person to judge

Each passes to the next by a rename, so that at every instant a folder is one of these. A process
may be killed between any two lines: `finish_commits` does what it still had to do."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

from torchtitan.checkpoint.files import seal_is_whole, sync_folder

MANIFEST = "manifest.json"
_STEP = re.compile(r"step-(\d+)")
_PASSING = re.compile(r"\.step-\d+\.(tmp|deleted)")


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the committed checkpoints in `folder`, ascending."""
    return [step for step, has_manifest in list_steps(folder) if has_manifest]


def list_steps(folder: Path) -> list[tuple[int, bool]]:
    """Return the step of every `step-N` folder, ascending, and whether it has a manifest."""
    if not folder.is_dir():
        return []
    matches = ((_STEP.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(m[1]), (path / MANIFEST).is_file()) for m, path in matches if m)


def draft_of(target: Path) -> Path:
    """Return the name under which a checkpoint is written."""
    return target.with_name(f".{target.name}.tmp")


def make_draft(target: Path, components: list[str]) -> None:
    """Make an empty draft with a folder for each component, and clear away what dead saves left."""
    finish_commits(target.parent)
    if target.parent.is_dir():
        for path in target.parent.iterdir():
            if _PASSING.fullmatch(path.name):
                shutil.rmtree(path)
    for name in components:
        (draft_of(target) / name).mkdir(parents=True)


def commit(target: Path) -> None:
    """Make the draft the checkpoint, in the place of one of the same name."""
    draft = draft_of(target)
    for folder in [*(path for path in draft.iterdir() if path.is_dir()), draft]:
        sync_folder(folder)
    trash = _trash_of(target)
    if trash.exists():
        shutil.rmtree(trash)
    if target.exists():  # saved by an earlier start that died right after, or by another setting
        target.rename(trash)
    try:
        draft.rename(target)
    except OSError:
        if trash.exists():
            trash.rename(target)
        raise
    sync_folder(target.parent)
    if trash.exists():
        shutil.rmtree(trash)


def finish_commits(folder: Path) -> None:
    """Give complete drafts their name, where a process was killed right before it did."""
    if not folder.is_dir():
        return
    for draft in folder.glob(".step-*.tmp"):
        target = draft.with_name(draft.name.removeprefix(".").removesuffix(".tmp"))
        manifest = draft / MANIFEST
        if manifest.is_file() and seal_is_whole(manifest) and not target.exists():
            commit(target)


def delete(checkpoint: Path) -> None:
    """Remove a checkpoint, its name first, so that no half of it can be taken for whole."""
    trash = _trash_of(checkpoint)
    if trash.exists():
        shutil.rmtree(trash)
    checkpoint.rename(trash)
    shutil.rmtree(trash)


def _trash_of(checkpoint: Path) -> Path:
    return checkpoint.with_name(f".{checkpoint.name}.deleted")


def set_aside(checkpoint: Path) -> None:
    """Take a checkpoint out of the row of steps without deleting it."""
    aside = checkpoint.with_name(f".{checkpoint.name}.aside")
    if aside.exists():
        shutil.rmtree(aside)
    checkpoint.rename(aside)
