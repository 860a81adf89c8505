"""Average checkpoints block by block, while torch's DCP writes the result."""

from __future__ import annotations

import logging
import shutil
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import (
    SavePlan,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import HashingFileSystem, read_manifest, summarize, verify
from torchtitan.checkpoint.reader import Region, TensorReader
from torchtitan.checkpoint.state import MODEL_STATE, Component
from torchtitan.checkpoint.storage import draft_of, list_steps
from torchtitan.mesh.ranks import reasons
from torchtitan.models.families import find_model
from torchtitan.resume_rules import find_run_step, read_settings

logger = logging.getLogger(__name__)
Kind = Literal["uniform", "ema"]
BLOCK = 1 << 22
"""Elements per block, but at least one row of a tensor."""
_KEPT = ("step", "layout", "config")
"""Entries that the result's manifest copies from the last checkpoint."""


def coefficients(num: int, *, method: Kind, decay: float) -> list[float]:
    """Return the factor of each checkpoint, before the sum is divided by `divisor`."""
    if method == "uniform":
        return [1.0] * num
    return [decay ** (num - 1), *((1 - decay) * decay ** (num - i) for i in range(2, num + 1))]


class Averaging(DefaultSavePlanner):
    """Lets DCP write the average block by block. A block is computed when it is written."""

    def __init__(self, readers: Sequence[TensorReader], *, factors: Sequence[float], divisor: int):
        super().__init__(flatten_state_dict=False)
        self._readers = readers
        self._factors, self._divisor = factors, divisor
        self._num_items = self._num_done = 0

    def create_local_plan(self) -> SavePlan:
        """Return an item per block of rows of each tensor."""
        items = []
        for name, entry in self._readers[0].entries.items():
            assert entry is not None
            properties, size = TensorProperties(dtype=entry.dtype), torch.Size(entry.shape)
            for chunk in _blocks(size):
                index = MetadataIndex(name, chunk.offsets)
                about = TensorWriteData(chunk=chunk, properties=properties, size=size)
                items.append(WriteItem(index=index, type=WriteItemType.SHARD, tensor_data=about))
        self._num_items = len(items)
        self.plan = SavePlan(items)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the average of a block."""
        assert write_item.tensor_data is not None
        block = self._average(write_item.index.fqn, write_item.tensor_data.chunk)
        before, self._num_done = self._num_done, self._num_done + 1
        if 10 * before // self._num_items < 10 * self._num_done // self._num_items:
            logger.info("averaged %d of %d blocks", self._num_done, self._num_items)
        return block

    def _average(self, name: str, chunk: ChunkStorageMetadata) -> Tensor:
        entry = self._readers[0].entries[name]
        assert entry is not None
        part = torch.empty(chunk.sizes, dtype=entry.dtype)
        if not part.is_floating_point():
            return self._equal(name, chunk, part)
        total = torch.zeros(chunk.sizes, dtype=torch.float64)
        for reader, factor in zip(self._readers, self._factors, strict=True):
            reader.read([Region(name, part, chunk.offsets)])
            total.add_(part, alpha=factor)
        return total.div_(self._divisor).to(part.dtype)

    def _equal(self, name: str, chunk: ChunkStorageMetadata, part: Tensor) -> Tensor:
        first = torch.empty_like(part)
        self._readers[0].read([Region(name, first, chunk.offsets)])
        for reader in self._readers[1:]:
            reader.read([Region(name, part, chunk.offsets)])
            if not torch.equal(part, first):
                raise CheckpointError(
                    f"'{name}' is of type {part.dtype}, which has no average, so it must be equal "
                    f"in all checkpoints; it differs between {self._readers[0].path} and "
                    f"{reader.path}"
                )
        return first


def _blocks(size: torch.Size) -> Iterator[ChunkStorageMetadata]:
    """Yield the blocks of rows of a tensor of this shape."""
    if not size or not size.numel():
        yield ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        return
    num_rows = max(1, BLOCK // (size.numel() // size[0]))
    for row in range(0, size[0], num_rows):
        count = min(num_rows, size[0] - row)
        offsets = torch.Size([row, *[0] * (len(size) - 1)])
        yield ChunkStorageMetadata(offsets, torch.Size([count, *size[1:]]))


def average(steps: Sequence[Path], target: Path, *, method: Kind, decay: float) -> None:
    """Write the average of checkpoints.

    `steps` are folders of checkpoints, the oldest first; `decay` is the EMA's, per checkpoint.
    Raises CheckpointError if the tensors differ, or a file is damaged; nothing is at `target`.
    """
    readers = [TensorReader(step / "model") for step in steps]
    check_tensors(readers)
    last = read_manifest(steps[-1])
    about: dict[str, Any] = {"kind": method, "steps": [str(step) for step in steps]}
    about |= {"decay": decay} if method == "ema" else {}
    divisor = len(steps) if method == "uniform" else 1
    factors = coefficients(len(steps), method=method, decay=decay)
    draft, files = draft_of(target), HashingFileSystem()
    shutil.rmtree(draft, ignore_errors=True)  # of a process that died
    try:
        writer = dcp.FileSystemWriter(draft / "model", sync_files=False)
        writer.fs = files  # it syncs each file when it is closed
        planner = Averaging(readers, factors=factors, divisor=divisor)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.save({}, storage_writer=writer, planner=planner, no_dist=True)
        components = {"model": Component(state=MODEL_STATE)}
        manifest = {**{key: last[key] for key in _KEPT if key in last}, "average": about}
        records = {f"model/{name}": record for name, record in files.records.items()}
        storage.complete(target, components, manifest, records)
    except CheckpointException as error:
        raise CheckpointError(f"{target} was not written: {reasons(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def check_alike(steps: Sequence[Path]) -> None:
    """Raise CheckpointError if a checkpoint has another model than the first, or an adapter."""
    settings = [read_settings(step) for step in steps]
    for step, config in zip(steps, settings, strict=True):
        if config.lora.rank:
            raise CheckpointError(
                f"{step} holds a LoRA adapter, which cannot be averaged: the average of its two "
                f"factors is not the average of their product"
            )
    models = [find_model(config.model)[1] for config in settings]
    for step, model in zip(steps[1:], models[1:], strict=True):
        if model != models[0]:
            raise CheckpointError(
                f"checkpoints must be of one model, but {step} has {model} and {steps[0]} has "
                f"{models[0]}"
            )


def check_tensors(readers: Sequence[TensorReader]) -> None:
    """Raise CheckpointError if the tensors differ in name, shape or type."""

    def kinds_of(reader: TensorReader) -> dict[str, str]:
        kinds = {}
        for name, entry in reader.entries.items():
            if entry is None:
                raise CheckpointError(f"{reader.path} must hold only tensors, got '{name}'")
            kinds[name] = f"{entry.dtype} {list(entry.shape)}"
        return kinds

    first = kinds_of(readers[0])
    for reader in readers[1:]:
        stored_kinds = kinds_of(reader)
        for name in sorted(first.keys() | stored_kinds.keys()):
            ours, theirs = (x.get(name, "missing") for x in (first, stored_kinds))
            if ours != theirs:
                raise CheckpointError(
                    f"checkpoints must hold the same tensors, but '{name}' is {theirs} in "
                    f"{reader.path} and {ours} in {readers[0].path}"
                )


def find_steps(path: Path, *, steps: Sequence[int] | None, checksums: bool) -> dict[int, Path]:
    """Return the checkpoints to average in a run's folder or checkpoint folder, by step.

    `steps` None: all; damaged ones are skipped with a warning. Raises CheckpointError if there are
    fewer than two, or a named step is missing or damaged.
    """
    # a run may keep its checkpoints in another folder, where the newest one is
    folder = path if list_steps(path) else find_run_step(path, verify=False).parent
    is_complete = dict(list_steps(folder))
    averages = {}
    for step in sorted(is_complete) if steps is None else steps:
        if step not in is_complete:
            raise CheckpointError(
                f"--steps {step} is not in {folder}, which has {', '.join(map(str, is_complete))}"
            )
        checkpoint = folder / f"step-{step}"
        mistakes = [] if is_complete[step] else ["it has no manifest"]
        mistakes = verify(checkpoint, group=None) if checksums and not mistakes else mistakes
        if mistakes and steps is not None:
            raise CheckpointError(f"--steps: {checkpoint} is damaged: {summarize(mistakes)}")
        if mistakes:
            logger.warning("%s is damaged and is skipped: %s", checkpoint, summarize(mistakes))
        else:
            averages[step] = checkpoint
    if len(averages) < 2:
        raise CheckpointError(f"an average needs 2 checkpoints, {folder} has {len(averages)}")
    return averages
