"""Folders on disk: a checkpoint exists whole or not at all.

A step's folder holds one folder a component. A component's tensors are a plain DCP checkpoint,
which any tool of PyTorch reads and every layout can load; everything else it knows is `state.json`.
All of it is written under another name, `manifest.json` last, and one rename makes it the
checkpoint: a run that dies or a disk that fills up while saving leaves the earlier checkpoints as
they were."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.base.errors import CheckpointError

logger = logging.getLogger(__name__)
T = TypeVar("T")
MANIFEST = "manifest.json"
STATE = "state.json"
_STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True, kw_only=True)
class Component:
    """One independently loadable part of a checkpoint."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    """Plain tensors, which every rank holds alike, or DTensors, or tensors of one rank by its
    name."""
    state: Mapping[str, Any] | None = None
    """What is no tensor, as JSON can hold it; the same on every rank."""


def on_first_rank(action: Callable[[], T], *, group: dist.ProcessGroup) -> T:
    """Run `action` on rank 0 and return what it returned on every rank.

    Raises:
        CheckpointError: The action met a file-system error or a damaged file; raised on every rank.
    """
    outcome: list[Any] = [None, None]
    if dist.get_rank(group) == 0:
        try:
            outcome[0] = action()
        except (OSError, ValueError, CheckpointError) as error:
            outcome[1] = str(error)
    dist.broadcast_object_list(outcome, group_src=0, group=group)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    return outcome[0]


def find_steps(folder: Path) -> list[int]:
    """Return the steps of the whole checkpoints in `folder`, ascending."""
    if not folder.is_dir():
        return []
    names = (_STEP_FOLDER.fullmatch(p.name) for p in folder.iterdir() if (p / MANIFEST).is_file())
    return sorted(int(match[1]) for match in names if match)


def write(
    target: Path,
    components: Mapping[str, Component],
    *,
    manifest: Mapping[str, Any],
    group: dist.ProcessGroup,
) -> None:
    """Write `components` from all ranks of `group` as the checkpoint `target`.

    Raises:
        CheckpointError: A rank could not write its part; nothing at `target` was changed.
    """
    draft = target.with_name(f".{target.name}.tmp")
    on_first_rank(lambda: _make_empty(draft, list(components)), group=group)
    try:
        for name, component in components.items():
            _save_tensors(component.tensors, draft / name, group=group)
    except CheckpointException as error:
        reasons = "; ".join(f"rank {rank}: {e[0]}" for rank, e in error.failures.items())
        on_first_rank(lambda: shutil.rmtree(draft), group=group)
        free_gib = shutil.disk_usage(target.parent).free / 2**30
        raise CheckpointError(
            f"{target} could not be written, the checkpoints before it are untouched; "
            f"{free_gib:.2f} GiB are free there; make room and start again. Torch says: {reasons}"
        ) from error
    on_first_rank(lambda: _commit(draft, target, components, manifest), group=group)


def _make_empty(draft: Path, names: list[str]) -> None:
    if draft.exists():
        shutil.rmtree(draft)
    for name in names:
        (draft / name).mkdir(parents=True)


def _save_tensors(tensors: Mapping[str, Tensor], folder: Path, *, group: dist.ProcessGroup) -> None:
    if tensors:
        writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=True)
        dcp.save(dict(tensors), storage_writer=writer, process_group=group)


def _commit(
    draft: Path, target: Path, components: Mapping[str, Component], manifest: Mapping[str, Any]
) -> None:
    for name, component in components.items():
        if component.state is not None:
            _write_json(draft / name / STATE, component.state)
    about = {"components": list(components), "torch": torch.__version__, **manifest}
    _write_json(draft / MANIFEST, about)
    if target.exists():  # saved by an earlier start that died right after, or by another setting
        delete(target)
    draft.rename(target)
    _sync_folder(target.parent)


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump(content, file, indent=1)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    # a rename is durable once the folder that holds the name is
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def delete(checkpoint: Path) -> None:
    """Remove a checkpoint, its name first, so that no half of it can be taken for whole."""
    trash = checkpoint.with_name(f".{checkpoint.name}.deleted")
    if trash.exists():
        shutil.rmtree(trash)
    checkpoint.rename(trash)
    shutil.rmtree(trash)


def read_state(checkpoint: Path, component: str) -> dict[str, Any]:
    """Return what a component knows beside its tensors.

    Raises:
        CheckpointError: The file is missing or not JSON.
    """
    return _read_json(checkpoint / component / STATE)


def read_manifest(checkpoint: Path) -> dict[str, Any]:
    """Return what the checkpoint says of itself.

    Raises:
        CheckpointError: The file is missing or not JSON.
    """
    return _read_json(checkpoint / MANIFEST)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from error


def read_tensors(
    checkpoint: Path,
    component: str,
    *,
    into: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    leaves_out: Callable[[str], bool] = lambda name: True,
) -> None:
    """Fill the tensors `into` in place from a component saved in any layout.

    `group` are the ranks that load together; None loads in this process alone. `leaves_out` tells
    which other names of the component may stay unread; any that may not is unexpected.

    Raises:
        CheckpointError: Names, shapes or types differ, or a file is missing or damaged.
    """
    folder = checkpoint / component
    try:
        reader = dcp.FileSystemReader(folder)
        stored = reader.read_metadata().state_dict_metadata
        _check_match(folder, stored, into, leaves_out=leaves_out)
        dcp.load(dict(into), storage_reader=reader, process_group=group, no_dist=group is None)
    except (OSError, CheckpointException) as error:
        raise CheckpointError(f"{folder} cannot be read: {error}") from error


def _check_match(
    folder: Path,
    stored: Mapping[str, Any],
    into: Mapping[str, Tensor],
    *,
    leaves_out: Callable[[str], bool],
) -> None:
    shapes, types = [], []
    for name in into.keys() & stored.keys():
        here, there = into[name], stored[name]
        if tuple(here.shape) != tuple(there.size):
            shapes.append(f"'{name}' has shape {list(there.size)}, not {list(here.shape)}")
        elif here.dtype != there.properties.dtype:
            types.append(f"'{name}' has type {there.properties.dtype}, not {here.dtype}")
    mistakes = {
        "missing": [f"'{name}'" for name in into if name not in stored],
        "unexpected": [f"'{n}'" for n in stored if n not in into and not leaves_out(n)],
        "of another shape": shapes,
        "of another type": types,
    }
    if any(mistakes.values()):
        raise CheckpointError(
            f"{folder} does not fit this job, whose model wants {len(into)} tensors of it:\n  "
            + "\n  ".join(
                f"{len(names)} {kind}: {'; '.join(sorted(names)[:8])}"
                + (" ..." if len(names) > 8 else "")
                for kind, names in mistakes.items()
                if names
            )
            + "\nuse the model and precision it was saved with; to leave parameters out on purpose "
            'name them: checkpoint.exclude_from_loading = ["output.*"], or ["optimizer"]'
        )
