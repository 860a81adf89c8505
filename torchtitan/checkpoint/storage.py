"""Write, commit and delete checkpoint folders.

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

import gc
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
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
    find_manifest,
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
Disk = tuple[int, ...]
"""The ranks that share a disk."""


# -- steps ---------------------------------------------------------------------------------------


def step_of(checkpoint: PurePath) -> int | None:
    """Return the step in the name of a folder; None if it is not named `step-N`."""
    match = STEP_NAME.fullmatch(checkpoint.name)
    return None if match is None else int(match[1])


def list_steps(folder: Path) -> list[tuple[int, bool]]:
    """Return the step of each `step-N` folder, ascending, and whether it has a manifest."""
    paths = folder.iterdir() if folder.is_dir() else ()
    steps = {step: path for path in paths if (step := step_of(path)) is not None}
    return [(step, os.path.isfile(steps[step] / MANIFEST)) for step in sorted(steps)]


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the committed checkpoints in `folder`, ascending."""
    return [step for step, has_manifest in list_steps(folder) if has_manifest]


def read_state(checkpoint: Path, component: str) -> StoredJSON:
    """Return the state of a component without its tensors."""
    return read_json(checkpoint / component / STATE)


# -- write ---------------------------------------------------------------------------------------


def write(
    target: Path,
    components: Mapping[str, Component],
    *,
    manifest: Mapping[str, Any],
    group: dist.ProcessGroup,
    disk: Disk | None = None,
) -> None:
    """Write and commit the checkpoint `target` from all ranks of `group`.

    A checkpoint of this name is replaced. `disk` has the ranks that share this rank's disk; None:
    all of `group`. Raises CheckpointError if a rank could not write its part. Nothing at `target`
    was changed.
    """
    draft = draft_of(target)
    try:
        on_each_disk(lambda: make_draft(target, list(components)), group=group, disk=disk)
        records: dict[str, FileRecord] = {}
        for name, component in components.items():
            if component.tensors is not None:
                written = _save_tensors(component.tensors, draft / name, group=group)
                records |= {f"{name}/{file}": record for file, record in written.items()}
        shares = on_every_rank(lambda: records, group=group)
        files = {name: record for share in shares for name, record in share.items()}
        finish = partial(complete, target, components, manifest, files)
        on_each_disk(finish, group=group, disk=disk)
    except (CheckpointError, CheckpointException) as error:
        clear = partial(shutil.rmtree, draft, ignore_errors=True)
        on_each_disk(clear, group=group, disk=disk)
        parent = next(path for path in target.absolute().parents if path.is_dir())
        raise CheckpointError(
            f"{target} could not be written ({shutil.disk_usage(parent).free / 2**30:.2f} GiB "
            f"free), the earlier checkpoints are unchanged: {reasons(error)}"
        ) from error


def _save_tensors(
    tensors: Mapping[str, Tensor], folder: Path, *, group: dist.ProcessGroup
) -> dict[str, FileRecord]:
    """Write the tensors of a component; return the records of the files that this rank wrote."""
    writer, files = dcp.FileSystemWriter(folder, sync_files=False), HashingFileSystem()
    writer.fs = files
    # the manifest has checksums; CRC-32, which no reader of torch compares, takes as long again
    computes_crc32 = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        with paused_gc():
            # also without tensors, as with SGD: other ranks may have some, readers expect metadata
            dcp.save({}, storage_writer=writer, planner=_Planner(tensors), process_group=group)
    finally:
        torch.serialization.set_crc32_options(computes_crc32)
    return files.records


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause Python's garbage collector, which takes most of the time if objects are many."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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


def draft_of(target: Path) -> Path:
    """Return the draft's folder of the checkpoint `target`."""
    return target.with_name(f".{target.name}.tmp")


def make_draft(target: Path, components: list[str]) -> None:
    """Create an empty draft with a folder per component; delete what interrupted saves left."""
    recover_commits(target.parent)
    for ending in ("tmp", "deleted"):
        for path in target.parent.glob(f".step-*.{ending}"):
            _remove(path)
    for name in components:
        (draft_of(target) / name).mkdir(parents=True)


def complete(
    target: Path,
    components: Mapping[str, Component],
    manifest: Mapping[str, Any],
    files: Mapping[str, FileRecord],
) -> None:
    """Add state and manifest to a draft, and commit it.

    The tensors of `components` are written already; `files` has the records of what all ranks
    wrote.
    """
    draft, records = draft_of(target), dict(files)
    for name, component in components.items():
        if component.state is not None:
            records[f"{name}/{STATE}"] = write_json(draft / name / STATE, component.state)
    entries = {name: {"size": r.size, "xxh3_128": r.digest} for name, r in sorted(records.items())}
    about = {"components": list(components), "torch": torch.__version__, **manifest}
    write_bytes(draft / MANIFEST, seal({**about, "files": entries}))
    commit(target)


# -- commit and delete ---------------------------------------------------------------------------


def commit(target: Path) -> None:
    """Rename the draft of `target`; a checkpoint of this name is deleted afterwards."""
    draft, trash = draft_of(target), target.with_name(f".{target.name}.deleted")
    for folder in [*(path for path in draft.iterdir() if path.is_dir()), draft]:
        _sync_folder(folder)
    is_replaced = target.exists()  # by a start that died right afterwards, or had other settings
    if is_replaced:
        _rename_over(target, trash)
    try:
        draft.rename(target)
    except OSError:
        if is_replaced:
            trash.rename(target)
        raise
    _sync_folder(target.parent)
    if trash.exists():  # also of a process that died here
        _remove(trash)


def recover_commits(folder: Path) -> None:
    """Commit the complete drafts in `folder`: their process died before the rename."""
    for draft in folder.glob(".step-*.tmp"):
        target = draft.with_name(draft.name.removeprefix(".").removesuffix(".tmp"))
        if step_of(target) is not None and not target.exists() and find_manifest(draft):
            commit(target)


def delete(checkpoint: Path) -> None:
    """Delete a checkpoint; it is renamed first, so that no partial folder passes for a checkpoint.

    A failure is logged: the newer checkpoints are there.
    """
    try:
        trash = _rename_over(checkpoint, checkpoint.with_name(f".{checkpoint.name}.deleted"))
    except OSError as error:
        logger.warning("%s is no longer needed, but cannot be deleted: %s", checkpoint, error)
    else:
        _remove(trash)


def set_aside_after(folder: Path, step: int, *, except_step: int) -> None:
    """Rename the folders of all steps after `step` except `except_step` to `step-N.damaged`."""
    for later in [n for n, _ in list_steps(folder) if n > step and n != except_step]:
        checkpoint = folder / f"step-{later}"
        aside = _rename_over(checkpoint, checkpoint.with_name(f"{checkpoint.name}.damaged"))
        logger.warning("%s was not used at the start and is now %s", checkpoint, aside)


def _rename_over(checkpoint: Path, target: Path) -> Path:
    """Rename a checkpoint, and delete what an interrupted process left under the new name."""
    if target.exists():
        shutil.rmtree(target)
    return checkpoint.rename(target)


def _remove(path: Path) -> None:
    try:
        shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s cannot be deleted; the next save tries again: %s", path, error)


def _sync_folder(folder: Path) -> None:
    """Make the names in a folder durable, as fsync does for the bytes of a file."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# -- ranks and disks -----------------------------------------------------------------------------


def find_disk(folder: Path, *, group: dist.ProcessGroup) -> Disk:
    """Return the ranks that share `folder` with this one. Collective.

    Host names do not tell: containers share a host, hosts share a disk. So each rank creates a
    file, and ranks that see the same files share a disk.
    """
    token = on_first_rank(lambda: secrets.token_hex(8), group=group)
    marks = [folder / f".rank-{rank}-{token}" for rank in range(group.size())]
    own = marks[group.rank()]

    def leave_mark() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        own.touch()

    on_every_rank(leave_mark, group=group)
    disks = on_every_rank(
        lambda: tuple(rank for rank, mark in enumerate(marks) if mark.exists()), group=group
    )
    on_every_rank(own.unlink, group=group)
    return disks[group.rank()]


def on_each_disk(
    action: Callable[[], None], *, group: dist.ProcessGroup, disk: Disk | None
) -> None:
    """Run `action` on the first rank of each disk. Collective over `group`.

    `disk` has the ranks that share this rank's disk; None: all of `group`. Raises CheckpointError
    if the action failed on any disk, on every rank.
    """
    is_first = group.rank() == (0 if disk is None else disk[0])
    on_every_rank(lambda: action() if is_first else None, group=group)
