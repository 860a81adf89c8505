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

import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

from torchtitan.base.errors import CheckpointError
from torchtitan.base.log import plural
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import HashingFileSystem, read_manifest, summarize, verify
from torchtitan.checkpoint.state import MODEL_STATE, Component
from torchtitan.mesh.ranks import reasons
from torchtitan.models.families import find_model
from torchtitan.resume_rules import find_run_step, read_settings
from torchtitan.tools.tensors import StoredTensors

KEPT = ("step", "layout", "config")
"""Entries of the last checkpoint's manifest that the result keeps."""


def average(
    checkpoint: Path,
    out: Path,
    *,
    steps: Sequence[int] | None,
    decay: float | None,
    verify: bool = True,
) -> str:
    """Write the average of checkpoints; return a line about it."""
    if storage.step_of(out) is not None:
        raise CheckpointError(f"OUT must not have the name of a run's step, got {out.name}")
    if decay is not None and not 0 < decay < 1:
        raise CheckpointError(f"--decay must be between 0 and 1, got {decay}")
    checkpoints = find_checkpoints(checkpoint, steps=steps, checksums=verify)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_average([*checkpoints.values()], out, decay=decay)
    names = f"{plural(len(checkpoints), 'step')}: {', '.join(map(str, checkpoints))}"
    return f"{out}: the {'mean' if decay is None else 'moving average'} of {names}"


def find_checkpoints(
    path: Path, *, steps: Sequence[int] | None, checksums: bool
) -> dict[int, Path]:
    """Return the checkpoints of a run's folder or checkpoint folder, by step; None: all.

    Raises CheckpointError if there are fewer than two, one is missing or damaged, has another model
    than the first, or an adapter, whose product is not averaged by averaging both factors.
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
    models = []
    for checkpoint in checkpoints.values():
        if checksums and (mistakes := verify(checkpoint, group=None)):
            raise CheckpointError(f"{checkpoint} is damaged: {summarize(mistakes)}")
        config = read_settings(checkpoint)
        models.append(find_model(config.model)[1])
        if config.lora.rank or models[-1] != models[0]:
            raise CheckpointError(
                f"checkpoints must be of one model without LoRA, but {checkpoint} has lora.rank = "
                f"{config.lora.rank} and {models[-1]}, and the first has {models[0]}"
            )
    return checkpoints


def write_average(checkpoints: Sequence[Path], target: Path, *, decay: float | None) -> None:
    """Write the average of checkpoints, the oldest first, as a checkpoint of weights.

    Raises CheckpointError if the tensors differ, or a file is damaged; nothing is at `target`.
    """
    stored = [StoredTensors(checkpoint, "model") for checkpoint in checkpoints]
    types = [{name: (t.dtype, [*t.shape]) for name, t in s.empty.items()} for s in stored]
    for tensors, of_tensors in zip(stored, types, strict=True):
        for name in sorted(of_tensors.keys() | types[0].keys()):
            if (mine := of_tensors.get(name)) != (first := types[0].get(name)):
                raise CheckpointError(
                    f"checkpoints must hold the same tensors, but '{name}' is {mine} in "
                    f"{tensors.path} and {first} in {stored[0].path}"
                )
    last = read_manifest(checkpoints[-1])
    about = {"steps": [str(checkpoint) for checkpoint in checkpoints], "decay": decay}
    draft, files = storage.draft_of(target), HashingFileSystem()
    shutil.rmtree(draft, ignore_errors=True)  # of a process that died
    try:
        planner = _Averaging(stored, decay=decay)
        writer = dcp.FileSystemWriter(draft / "model", sync_files=False)
        writer.fs = files  # it syncs each file when it is closed
        dcp.save({**stored[0].empty}, storage_writer=writer, planner=planner, no_dist=True)
        manifest = {**{key: last[key] for key in KEPT if key in last}, "average": about}
        records = {f"model/{name}": record for name, record in files.records.items()}
        storage.complete(target, {"model": Component(state=MODEL_STATE)}, manifest, records)
    except CheckpointException as error:
        raise CheckpointError(f"{target} was not written: {reasons(error)}") from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


class _Averaging(DefaultSavePlanner):
    """Plans tensors without elements, and averages each when DCP writes it."""

    def __init__(self, stored: Sequence[StoredTensors], *, decay: float | None) -> None:
        super().__init__(flatten_state_dict=False)
        self._stored, self._decay = stored, decay

    def resolve_data(self, write_item: WriteItem) -> Tensor:
        """Return the average of a tensor."""
        name, decay = write_item.index.fqn, self._decay
        assert name is not None
        first, *later = self._stored
        if not first.empty[name].dtype.is_floating_point:
            if any(not tensors[name].equal(first[name]) for tensors in later):
                raise CheckpointError(f"'{name}' has no average, and must be equal in all")
            return first[name]
        total = first[name].double()
        for tensors in later:
            if decay is None:
                total += tensors[name].double()
            else:
                total.mul_(decay).add_(tensors[name].double(), alpha=1 - decay)
        if decay is None:
            total /= len(self._stored)
        return total.to(first.empty[name].dtype)
