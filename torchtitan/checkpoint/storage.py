"""Write one checkpoint folder, and read its JSON files.

A checkpoint has a folder per component. The tensors of a component are a plain DCP checkpoint,
which any tool of PyTorch reads and every layout can load; the rest of its state is `state.json`.

A checkpoint is committed complete or not at all. It is written as a draft, each file is hashed on
its way to the disk, the manifest with the checksums comes last, and one rename commits it. A run
that dies or fills the disk while saving leaves the earlier checkpoints unchanged. Folders:

    .step-N.tmp       a draft; with a manifest it is complete and only lacks its name
    step-N            a checkpoint
    .step-N.deleted   being deleted
    step-N.damaged    newer than the step that a run resumed from

A process may die between any two lines: `recover_commits` finishes what was left to do.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.checkpoint.checksums import (
    MANIFEST,
    FileRecord,
    HashingFileSystem,
    is_sealed,
    seal,
    write_bytes,
    write_json,
)
from torchtitan.checkpoint.state import Component
from torchtitan.mesh.ranks import on_every_rank, on_first_rank, reasons

logger = logging.getLogger(__name__)
STATE = "state.json"
METADATA = ".metadata"
"""DCP's list of the tensors in a folder."""
STEP_NAME = re.compile(r"step-(0|[1-9][0-9]{0,17})")
_TEMPORARY = re.compile(r"\.step-[0-9]+\.(tmp|deleted)")
_MANIFEST_TYPES = {"step": int, "components": list, "layout": dict, "config": str}


def list_steps(folder: Path) -> list[tuple[int, bool]]:
    """Return the step of each `step-N` folder, ascending, and whether it has a manifest."""
    if not folder.is_dir():
        return []
    matches = ((STEP_NAME.fullmatch(path.name), path) for path in folder.iterdir() if path.is_dir())
    return sorted((int(m[1]), _has_manifest(path)) for m, path in matches if m)


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the committed checkpoints in `folder`, ascending."""
    return [step for step, has_manifest in list_steps(folder) if has_manifest]


def step_of(checkpoint: PurePath) -> int | None:
    """Return the step in the name of a folder; None if it is not named `step-N`."""
    match = STEP_NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def _has_manifest(checkpoint: Path) -> bool:
    try:
        return (checkpoint / MANIFEST).is_file()
    except OSError:  # a damaged or unreadable folder does not hide other steps
        return False


def write(
    target: Path,
    components: Mapping[str, Component],
    *,
    manifest: Mapping[str, Any],
    group: dist.ProcessGroup,
    disk: dist.ProcessGroup | None = None,
) -> None:
    """Write and commit the checkpoint `target` from all ranks of `group`.

    Args:
        target: The checkpoint's folder. A checkpoint of this name is replaced.
        components: Tensors and state by component.
        manifest: Entries added to the manifest.
        group: All ranks.
        disk: Ranks that share this rank's disk. None: all of `group`.

    Raises:
        CheckpointError: A rank could not write its part. Nothing at `target` was changed.
    """
    try:
        on_each_disk(lambda: make_draft(target, list(components)), group=group, disk=disk)
        records: dict[str, FileRecord] = {}
        for name, component in components.items():
            if component.tensors is not None:
                written = _save_tensors(component.tensors, draft_of(target) / name, group=group)
                records |= {f"{name}/{file}": record for file, record in written.items()}
        all_records = on_every_rank(lambda: records, group=group)
        if disk is None:
            on_first_rank(partial(_check_visible, draft_of(target), all_records), group=group)
        finish = partial(complete, target, components, manifest, all_records)
        on_each_disk(finish, group=group, disk=disk)
    except (CheckpointError, CheckpointException) as error:
        clear = partial(shutil.rmtree, draft_of(target), ignore_errors=True)
        on_each_disk(clear, group=group, disk=disk)
        raise CheckpointError(
            f"{target} could not be written ({_free_space(target)}); the earlier checkpoints are "
            f"unchanged: {reasons(error)}; free space or fix the folder, and run the same command "
            f"again"
        ) from error


def _save_tensors(
    tensors: Mapping[str, Tensor], folder: Path, *, group: dist.ProcessGroup
) -> dict[str, FileRecord]:
    """Write the tensors of a component; return the records of the files that this rank wrote."""
    writer, files = dcp.FileSystemWriter(folder, sync_files=False), HashingFileSystem()
    writer.fs = files
    # also without tensors, as with SGD: other ranks may have some, and readers expect metadata
    dcp.save({}, storage_writer=writer, planner=_Planner(tensors), process_group=group)
    return files.records


class _Planner(DefaultSavePlanner):
    """Plans `tensors`; `dcp.save` logs each entry that it gets, longer than a small write takes."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._tensors = dict(tensors)

    def set_up_planner(
        self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        # `dcp.save` looks for these names in the signature
        super().set_up_planner(self._tensors, storage_meta, is_coordinator)


def _check_visible(draft: Path, all_records: list[dict[str, FileRecord]]) -> None:
    """Raise CheckpointError if this rank does not see a file as another rank wrote it."""
    for rank, records in enumerate(all_records):
        for name, record in records.items():
            if not (draft / name).is_file() or (draft / name).stat().st_size != record.size:
                raise CheckpointError(f"rank 0 does not see {draft / name}, written by rank {rank}")


def _free_space(target: Path) -> str:
    folder = next(path for path in target.absolute().parents if path.is_dir())
    return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB free"


def draft_of(target: Path) -> Path:
    """Return the draft's folder of the checkpoint `target`."""
    return target.with_name(f".{target.name}.tmp")


def make_draft(target: Path, components: list[str]) -> None:
    """Create an empty draft with a folder per component; delete what interrupted saves left."""
    recover_commits(target.parent)
    if target.parent.is_dir():
        for path in target.parent.iterdir():
            if _TEMPORARY.fullmatch(path.name):
                _remove(path)
    for name in components:
        (draft_of(target) / name).mkdir(parents=True)


def complete(
    target: Path,
    components: Mapping[str, Component],
    manifest: Mapping[str, Any],
    all_records: list[dict[str, FileRecord]],
) -> None:
    """Add state and manifest to a draft, and commit it.

    Args:
        target: The checkpoint's folder.
        components: State by component; their tensors are written already.
        manifest: Entries added to the manifest.
        all_records: Per rank, the records of the files that it wrote.
    """
    draft = draft_of(target)
    records = {name: record for part in all_records for name, record in part.items()}
    for name, component in components.items():
        if component.state is not None:
            records[f"{name}/{STATE}"] = write_json(draft / name / STATE, component.state)
    files = {name: {"size": r.size, "xxh3_128": r.digest} for name, r in sorted(records.items())}
    about = {"components": list(components), "torch": torch.__version__, **manifest, "files": files}
    write_bytes(draft / MANIFEST, seal(about))
    commit(target)


def commit(target: Path) -> None:
    """Rename the draft of `target`; a checkpoint of this name is deleted afterwards."""
    draft = draft_of(target)
    for folder in [*(path for path in draft.iterdir() if path.is_dir()), draft]:
        _sync_folder(folder)
    replaced = None
    if target.exists():  # from a start that died right afterwards, or had other settings
        replaced = _rename_over(target, ".{}.deleted")
    try:
        draft.rename(target)
    except OSError:
        if replaced is not None:
            replaced.rename(target)
        raise
    _sync_folder(target.parent)
    trash = target.with_name(f".{target.name}.deleted")
    if trash.exists():  # also of a process that died here
        _remove(trash)


def recover_commits(folder: Path) -> None:
    """Commit the complete drafts in `folder`: their process died before the rename."""
    if not folder.is_dir():
        return
    for draft in folder.glob(".step-*.tmp"):
        target = draft.with_name(draft.name.removeprefix(".").removesuffix(".tmp"))
        manifest = draft / MANIFEST
        if step_of(target) is None:
            continue
        try:
            is_complete = manifest.is_file() and is_sealed(manifest.read_bytes())
            is_complete = is_complete and not target.exists()
        except OSError as error:
            logger.warning("%s is not used: %s", draft, error)
            continue
        if is_complete:
            commit(target)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that no partial folder passes for a checkpoint.

    A failure is logged: the newer checkpoints are there.
    """
    try:
        trash = _rename_over(checkpoint, ".{}.deleted")
    except OSError as error:
        logger.warning("%s is no longer needed, but cannot be deleted: %s", checkpoint, error)
    else:
        _remove(trash)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be deleted; the next save tries again: %s", path, error)


def set_aside_after(folder: Path, step: int, *, except_step: int) -> None:
    """Rename the folders of all steps after `step` except `except_step` to `step-N.damaged`."""
    for later in [n for n, _ in list_steps(folder) if n > step and n != except_step]:
        checkpoint = folder / f"step-{later}"
        aside = _rename_over(checkpoint, "{}.damaged")
        logger.warning("%s was not used at the start and is now %s", checkpoint, aside)


def _rename_over(checkpoint: Path, form: str) -> Path:
    """Rename a checkpoint, and delete what an interrupted process left under the new name."""
    target = checkpoint.with_name(form.format(checkpoint.name))
    if target.exists():
        shutil.rmtree(target)
    return checkpoint.rename(target)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, as fsync does for the bytes of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_state(checkpoint: Path, component: str) -> StoredJSON:
    """Return the state of a component without its tensors."""
    return read_json(checkpoint / component / STATE)


def read_manifest(checkpoint: Path) -> StoredJSON:
    """Return the manifest of a checkpoint.

    Raises:
        CheckpointError: The file is missing or damaged, or the folder is named for another step.
    """
    manifest = read_json(checkpoint / MANIFEST).check_types(_MANIFEST_TYPES)
    if "step" in manifest:
        manifest.check_counts("step")
    for name in manifest.get("components", ()):
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise CheckpointError(
                f"{manifest.path} must list the folders beside it as components, got "
                f"{str(name)[:60]!r}; use another checkpoint"
            )
    expected_step = step_of(checkpoint)
    if expected_step is not None and manifest.get("step", expected_step) != expected_step:
        raise CheckpointError(
            f"{checkpoint} must hold step {expected_step}, but its {MANIFEST} has step "
            f"{manifest['step']}; rename it to step-{manifest['step']}, or move it away"
        )
    return manifest


# -- ranks and disks -----------------------------------------------------------------------------


def find_disks(
    folder: Path, *, group: dist.ProcessGroup, timeout_seconds: int
) -> dist.ProcessGroup | None:
    """Return the group of ranks that share `folder` with this one; None if all do. Collective.

    Host names do not tell: containers share a host, hosts share a disk. So each rank creates a
    file, and ranks that see the same files share a disk.
    """
    token = on_first_rank(lambda: secrets.token_hex(8), group=group)

    def mark_of(rank: int) -> Path:
        return folder / f".rank-{rank}-{token}"

    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def leave_mark() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark_of(rank).touch()

    on_every_rank(leave_mark, group=group)
    seen = on_every_rank(
        lambda: tuple(
            other_rank for other_rank in range(num_ranks) if mark_of(other_rank).exists()
        ),
        group=group,
    )
    on_every_rank(mark_of(rank).unlink, group=group)
    disks = sorted(set(seen))
    if len(disks) == 1:
        return None
    # every rank must create every group
    groups = {
        ranks: dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        for ranks in disks
    }
    own: dist.ProcessGroup = groups[seen[rank]]
    return own


def on_each_disk(
    action: Callable[[], None], *, group: dist.ProcessGroup | None, disk: dist.ProcessGroup | None
) -> None:
    """Run `action` on the first rank of each disk. Collective over `group`.

    Args:
        action: Function without arguments.
        group: All ranks. None: this process only.
        disk: Ranks that share this rank's disk. None: all of `group`.

    Raises:
        CheckpointError: The action failed on any disk; raised on every rank.
    """
    if disk is None:
        on_first_rank(action, group=group)
    else:
        on_every_rank(lambda: on_first_rank(action, group=disk), group=group)
