"""Folders on disk: a checkpoint exists whole or not at all.

A step's folder holds one folder a component. A component's tensors are a plain DCP checkpoint,
which any tool of PyTorch reads and every layout can load; everything else it knows is `state.json`.
All of it is written under another name, each file hashed on its way to the disk, `manifest.json`
with the checksums last, and one rename makes it the checkpoint: a run that dies or a disk that
fills up while saving leaves the earlier checkpoints as they were."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.disks import on_each_disk
from torchtitan.checkpoint.files import (
    Content,
    FileRecord,
    HashingFileSystem,
    check_counts,
    checked_kinds,
    read_json,
    write_json,
    write_sealed_json,
)
from torchtitan.checkpoint.folders import (
    MANIFEST,
    commit,
    draft_of,
    make_draft,
    step_of,
)
from torchtitan.checkpoint.metadata import is_tensor, read_metadata
from torchtitan.checkpoint.pieces import TensorReader, fill
from torchtitan.checkpoint.planner import SmallOnFirstRank
from torchtitan.checkpoint.ranks import on_every_rank, on_first_rank, reasons, union
from torchtitan.checkpoint.rows import HeadDim

logger = logging.getLogger(__name__)
STATE = "state.json"
Shape = tuple[int, ...]
_MANIFEST_KINDS = {"step": int, "components": list, "layout": dict, "config": str}


@dataclass(frozen=True, kw_only=True)
class Component:
    """One independently loadable part of a checkpoint."""

    tensors: Mapping[str, Tensor] | None = None
    """Plain tensors, which every rank holds alike, or DTensors, or tensors of one rank by its
    name; they may be none on this rank, or on all of them. None, on all ranks alike: a component
    that has no tensors by its nature."""
    state: Mapping[str, Any] | None = None
    """State other than tensors, in JSON-compatible values; the same on every rank."""


def write(
    target: Path,
    components: Mapping[str, Component],
    *,
    manifest: Mapping[str, Any],
    group: dist.ProcessGroup,
    disk: dist.ProcessGroup | None = None,
) -> None:
    """Write `components` from all ranks of `group` as the checkpoint `target`; `disk`: the ranks
    that share its disk with this one, None: all of them.

    Raises:
        CheckpointError: A rank could not write its part; nothing at `target` was changed.
    """
    try:
        on_each_disk(lambda: make_draft(target, list(components)), group=group, disk=disk)
        records: dict[str, FileRecord] = {}
        for name, component in components.items():
            if component.tensors is not None:
                written = _save_tensors(component.tensors, draft_of(target) / name, group=group)
                records |= {f"{name}/{file}": record for file, record in written.items()}
        everyone = on_every_rank(lambda: records, group=group)
        if disk is None:
            on_first_rank(partial(_check_written, draft_of(target), everyone), group=group)
        finish = partial(complete, target, components, manifest, everyone)
        on_each_disk(finish, group=group, disk=disk)
    except (CheckpointError, CheckpointException) as error:
        clear = partial(shutil.rmtree, draft_of(target), ignore_errors=True)
        on_each_disk(clear, group=group, disk=disk)
        raise CheckpointError(
            f"{target} could not be written, the checkpoints before it are untouched; "
            f"{_free_space(target)}; make room or mend the folder, and start again: "
            f"{reasons(error)}"
        ) from error


def _save_tensors(
    tensors: Mapping[str, Tensor], folder: Path, *, group: dist.ProcessGroup
) -> dict[str, FileRecord]:
    """Write a component's tensors, and return the records of the files that this rank wrote."""
    files = HashingFileSystem()
    writer = dcp.FileSystemWriter(folder, single_file_per_rank=True, sync_files=False)
    writer.fs = files  # it syncs each file when it is closed
    # also without tensors, as SGD's state is: other ranks may have some, and readers want metadata
    planner = SmallOnFirstRank()
    dcp.save(dict(tensors), storage_writer=writer, planner=planner, process_group=group)
    return files.records


def _check_written(draft: Path, everyone: list[dict[str, FileRecord]]) -> None:
    """Refuse to commit files that this rank does not see as others wrote them."""
    for rank, written in enumerate(everyone):
        for name, record in written.items():
            if not (draft / name).is_file() or (draft / name).stat().st_size != record.size:
                raise CheckpointError(f"{draft / name}, written by rank {rank}, is not seen there")


def complete(
    target: Path,
    components: Mapping[str, Component],
    manifest: Mapping[str, Any],
    everyone: list[dict[str, FileRecord]],
) -> None:
    """Write what a draft still lacks, the manifest last, and give it its name; `everyone`: the
    records of the files that each rank wrote."""
    draft = draft_of(target)
    records = {name: record for each in everyone for name, record in each.items()}
    for name, component in components.items():
        if component.state is not None:
            records[f"{name}/{STATE}"] = write_json(draft / name / STATE, component.state)
    files = {name: {"size": r.size, "xxh3_128": r.digest} for name, r in sorted(records.items())}
    about = {"components": list(components), "torch": torch.__version__, **manifest, "files": files}
    write_sealed_json(draft / MANIFEST, about)
    commit(target)


def _free_space(target: Path) -> str:
    folder = next(path for path in target.absolute().parents if path.is_dir())
    return f"{shutil.disk_usage(folder).free / 2**30:.2f} GiB are free there"


def read_state(checkpoint: Path, component: str) -> Content:
    """Return what a component knows beside its tensors."""
    return read_json(checkpoint / component / STATE)


def read_manifest(checkpoint: Path) -> Content:
    """Return what the checkpoint says of itself.

    Raises:
        CheckpointError: The file is missing or not a JSON object, or an entry is of another kind,
            or the folder has the name of another step.
    """
    manifest = checked_kinds(read_json(checkpoint / MANIFEST), kinds=_MANIFEST_KINDS)
    if "step" in manifest:
        check_counts(manifest, "step")
    for name in manifest.get("components", ()):
        if not isinstance(name, str) or Path(name).name != name or name == "..":
            raise CheckpointError(
                f"{manifest.path} must list the folders beside it as components, got "
                f"{str(name)[:60]!r}; use another checkpoint"
            )
    named = step_of(checkpoint)
    if named is not None and manifest.get("step", named) != named:
        raise CheckpointError(
            f"{checkpoint} must hold step {named}, as its name says, but its {MANIFEST} says step "
            f"{manifest['step']}: it was renamed or copied; rename it back to "
            f"step-{manifest['step']}, or move it away"
        )
    return manifest


def stored_names(
    checkpoint: Path, component: str, *, group: dist.ProcessGroup | None
) -> dict[str, bool]:
    """Return the names of a component's entries, and whether each is a tensor."""

    def names() -> dict[str, bool]:
        stored = read_metadata(checkpoint / component).state_dict_metadata
        return {name: is_tensor(entry) for name, entry in stored.items()}

    return on_first_rank(names, group=group)


def read_tensors(
    checkpoint: Path,
    component: str,
    *,
    into: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    leaves_out: Callable[[str], bool] = lambda name: True,
    may_grow: Collection[str] = (),
    in_halves: HeadDim = lambda name: None,
) -> None:
    """Fill the tensors `into` in place from a component saved in any layout.

    `group` are the ranks that load together; None loads in this process alone. `leaves_out` tells
    which other names of the component may stay unread; any that may not is unexpected. Of a tensor
    that `may_grow` fewer rows may be stored; those behind them stay as they are. `in_halves` tells
    the width of the heads of a tensor that is stored in halves (`rows.py`); None: it is as ours.

    Raises:
        CheckpointError: Names, shapes or types differ, or a file is missing, damaged or refused.
    """
    folder = checkpoint / component
    # of all ranks: a pipeline stage wants a part of what is there, and has no part of the rest
    wanted = union({n: (tuple(t.shape), (str(t.dtype),)) for n, t in into.items()}, group=group)
    metadata = on_first_rank(lambda: read_metadata(folder), group=group)
    readers: list[TensorReader] = []

    def open_component() -> None:
        reader = TensorReader(folder, metadata)
        reader.check_whole(into)
        there = {name: _kind(entry) for name, entry in reader.entries.items()}
        grown = check_match(folder, there, wanted, leaves_out=leaves_out, may_grow=may_grow)
        reader.grow(grown)
        reader.turn_halves({name: in_halves(name) for name in into})
        readers.append(reader)

    on_every_rank(open_component, group=group)
    fill(into, reader=readers[0], group=group)


def _kind(entry: Any) -> tuple[Shape | None, str]:
    if not is_tensor(entry):
        return None, "raw bytes"
    return tuple(entry.size), str(entry.properties.dtype)


def check_match(
    place: Path,
    stored: Mapping[str, tuple[Shape | None, str]],
    wanted: Mapping[str, tuple[Shape, Collection[str]]],
    *,
    leaves_out: Callable[[str], bool],
    may_grow: Collection[str] = (),
    spell: Callable[[str], str] = repr,
) -> dict[str, Shape]:
    """Compare stored tensors, by shape (None: raw bytes) and type, with the wanted ones, by shape
    and possible types; return the shapes of those that grow. `spell` shows a name."""
    grown, shapes, types = {}, [], []
    for name in wanted.keys() & stored.keys():
        (shape, possible), (there, dtype) = wanted[name], stored[name]
        if there is None:
            types.append(f"{spell(name)} is raw bytes, which are never loaded")
        elif name in may_grow and there[1:] == shape[1:] and there[0] < shape[0]:
            grown[name] = shape
            text = "%s: %d rows are of %s, the %d behind them begin anew"
            logger.info(text, name, there[0], place, shape[0] - there[0])
        elif there != shape:
            shapes.append(f"{spell(name)} has shape {list(there)}, not {list(shape)}")
        if there is not None and dtype not in possible:
            types.append(f"{spell(name)} has type {dtype}, not {', '.join(possible)}")
    mistakes = {
        "missing": [spell(n) for n in wanted if n not in stored],
        "unexpected": [spell(n) for n in stored if n not in wanted and not leaves_out(n)],
        "of another shape": shapes,
        "of another type": types,
    }
    if any(mistakes.values()):
        raise CheckpointError(
            f"{place} does not fit this job, whose model wants {len(wanted)} tensors of it:\n  "
            + "\n  ".join(
                f"{len(names)} {kind}: {'; '.join(sorted(names)[:8])}"
                + (" ..." if len(names) > 8 else "")
                for kind, names in mistakes.items()
                if names
            )
            + "\nuse the model.flavor and training.dtype that it was saved with; to leave "
            'parameters out on purpose name them: checkpoint.exclude_from_loading = ["output.*"], '
            'or ["optimizer"]'
        )
    return grown
