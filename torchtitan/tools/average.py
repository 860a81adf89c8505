"""Average the weights of a run's checkpoints.

The average of the last checkpoints w_1 ... w_k is often better than the last one, as if the
learning rate had decayed further. Without a decay d it is their mean (arXiv 1803.05407), with one
an exponential moving average (Polyak averaging), whose start at w_1 needs no bias correction:

    m_1 = w_1,  m_i = d m_{i-1} + (1 - d) w_i

Sums are in float64, and each element is rounded once, to its stored type. Memory holds one tensor
at a time: DCP asks the planner for each tensor when it writes it.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import HashingFileSystem, read_manifest, summarize, verify
from torchtitan.checkpoint.reader import Region, TensorReader
from torchtitan.checkpoint.state import MODEL_STATE, Component
from torchtitan.mesh.ranks import reasons
from torchtitan.models.families import find_model
from torchtitan.resume_rules import find_run_step, read_settings

KEPT = ("step", "layout", "config")
"""Entries of the last checkpoint's manifest that the result keeps."""


def find_checkpoints(
    path: Path, *, steps: Sequence[int] | None, checksums: bool
) -> dict[int, Path]:
    """Return the checkpoints of a run's folder or checkpoint folder, by step; None: all.

    Raises CheckpointError if there are fewer than two, or one is missing or damaged.
    """
    folder = path if storage.find_steps(path) else find_run_step(path, verify=False).parent
    available = storage.find_steps(folder)
    selected = available if steps is None else sorted({*steps})
    if len(selected) < 2 or not {*selected} <= {*available}:
        raise CheckpointError(
            f"--steps must name at least 2 checkpoints of {folder}, which has "
            f"{', '.join(map(str, available))}; got {', '.join(map(str, selected))}"
        )
    checkpoints = {step: folder / f"step-{step}" for step in selected}
    for checkpoint in checkpoints.values() if checksums else ():
        if mistakes := verify(checkpoint, group=None):
            raise CheckpointError(f"{checkpoint} is damaged: {summarize(mistakes)}")
    return checkpoints


def check_models(checkpoints: Sequence[Path]) -> None:
    """Raise CheckpointError if a checkpoint has another model than the first, or an adapter: the
    average of its two factors is not that of their product."""
    first = None
    for checkpoint in checkpoints:
        config = read_settings(checkpoint)
        model = find_model(config.model)[1]
        first = first or model
        if config.lora.rank or model != first:
            raise CheckpointError(
                f"checkpoints must be of one model without LoRA, but {checkpoint} has lora.rank = "
                f"{config.lora.rank} and {model}, and {checkpoints[0]} has {first}"
            )


def write_average(checkpoints: Sequence[Path], target: Path, *, decay: float | None) -> None:
    """Write the average of checkpoints, the oldest first, as a checkpoint of weights.

    Raises CheckpointError if the tensors differ, or a file is damaged; nothing is at `target`.
    """
    readers = [TensorReader(checkpoint / "model") for checkpoint in checkpoints]
    last = read_manifest(checkpoints[-1])
    about = {"steps": [str(checkpoint) for checkpoint in checkpoints], "decay": decay}
    draft, files = storage.draft_of(target), HashingFileSystem()
    shutil.rmtree(draft, ignore_errors=True)  # of a process that died
    try:
        planner = _Averaging(readers, decay=decay)
        writer = dcp.FileSystemWriter(draft / "model", sync_files=False)
        writer.fs = files  # it syncs each file when it is closed
        dcp.save(planner.tensors, storage_writer=writer, planner=planner, no_dist=True)
        manifest = {**{key: last[key] for key in KEPT if key in last}, "average": about}
        records = {f"model/{name}": record for name, record in files.records.items()}
        storage.complete(target, {"model": Component(state=MODEL_STATE)}, manifest, records)
    except CheckpointException as error:
        raise CheckpointError(f"{target} was not written: {reasons(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _Averaging(DefaultSavePlanner):
    """Plans `tensors`, which are on the meta device, and averages each when DCP writes it."""

    def __init__(self, readers: Sequence[TensorReader], *, decay: float | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._readers, self._decay = readers, decay
        self.tensors = self._empty(readers[0])
        for reader in readers[1:]:
            tensors = self._empty(reader)
            for name in sorted(tensors.keys() | self.tensors.keys()):
                stored, first = (
                    None if t is None else (t.dtype, list(t.shape))
                    for t in (tensors.get(name), self.tensors.get(name))
                )
                if stored != first:
                    raise CheckpointError(
                        f"checkpoints must hold the same tensors, but '{name}' is {stored} in "
                        f"{reader.path} and {first} in {readers[0].path}"
                    )

    def _empty(self, reader: TensorReader) -> dict[str, Tensor]:
        tensors = {}
        for name, entry in reader.entries.items():
            if entry is None:
                raise CheckpointError(f"{reader.path} must hold only tensors, got '{name}'")
            tensors[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")
        return tensors

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the average of a tensor."""
        name = write_item.index.fqn
        if not self.tensors[name].is_floating_point():
            return self._equal(name)
        total = self._read(self._readers[0], name).double()
        for reader in self._readers[1:]:
            tensor = self._read(reader, name).double()
            if self._decay is None:
                total += tensor
            else:
                total.mul_(self._decay).add_(tensor, alpha=1 - self._decay)
        if self._decay is None:
            total /= len(self._readers)
        return total.to(self.tensors[name].dtype)

    def _equal(self, name: str) -> Tensor:
        """Return a tensor of another type, which has no average."""
        first = self._read(self._readers[0], name)
        for reader in self._readers[1:]:
            if not self._read(reader, name).equal(first):
                raise CheckpointError(
                    f"'{name}' of type {first.dtype} must be equal in all checkpoints, and differs "
                    f"between {self._readers[0].path} and {reader.path}"
                )
        return first

    def _read(self, reader: TensorReader, name: str) -> Tensor:
        tensor = torch.empty_like(self.tensors[name], device="cpu")
        reader.read([Region(name, tensor, [0] * tensor.dim())])
        return tensor
