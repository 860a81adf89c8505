"""Export a checkpoint as a Hugging Face folder, by all ranks together.

The weights are read from the checkpoint on disk, where they are unsharded in any layout. So nothing
is gathered, no GPU holds a full tensor, and the same code converts a checkpoint long after its run.
Each file is written by one rank, which holds its tensors. The cost is that a run reads its weights
once more.

The folder is written under a temporary name and renamed when every rank has finished.
"""

from __future__ import annotations

import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import HashingFile, write_json
from torchtitan.checkpoint.reader import Entries, TensorReader, fill
from torchtitan.checkpoint.rows import to_their_rows
from torchtitan.checkpoint.state import VOCABULARY
from torchtitan.checkpoint.storage import commit, draft_of
from torchtitan.finetune.lora import is_adapter
from torchtitan.hf.config import find_inexpressible, new_config
from torchtitan.hf.names import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    CARD,
    CONFIG,
    GENERATION_CONFIG,
    INDEX,
    WEIGHTS,
    Names,
    any_layer,
)
from torchtitan.hf.peft import AdapterExport
from torchtitan.hf.weights import add_rows
from torchtitan.mesh.ranks import on_every_rank, on_first_rank
from torchtitan.models.spec import EACH

logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 2_000_000_000


@dataclass(frozen=True, kw_only=True)
class HFExport:
    """Contents of a folder besides the weights of the checkpoint."""

    names: Names
    dtype: torch.dtype | None = None
    """Type of the weights. None: as stored in the checkpoint."""
    carried: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json that are not sizes."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy by their new names: the tokenizer and its settings."""
    generation: Mapping[str, Any] | None = None
    """The generation_config.json. None: the one in `files`, if any."""
    max_file_bytes: int = MAX_FILE_BYTES
    """Largest size of a file of weights, unless it has only one tensor."""
    adapter: AdapterExport | None = None
    """How LoRA adapters in the checkpoint are written."""
    add_tokens: int = 0
    """Rows to append to embedding and output head; `names` has the larger vocabulary."""
    card: Callable[[Path], str] | None = None
    """Returns the model card, given the checkpoint. None: no card."""

    @property
    def adapter_only(self) -> bool:
        """Whether the folder holds only the adapter."""
        return self.adapter is not None and not self.adapter.merge

    def is_adapter(self, name: str) -> bool:
        """Return whether a tensor of the checkpoint is part of the adapter."""
        adapter = self.adapter
        return adapter is not None and (
            is_adapter(name) or (adapter.has_embeddings and name in VOCABULARY)
        )

    def file_name(self, number: int, *, num_files: int) -> str:
        """Return the name of a file of weights, as transformers numbers them."""
        if self.adapter_only:
            return ADAPTER_WEIGHTS
        return WEIGHTS if num_files == 1 else f"model-{number + 1:05}-of-{num_files:05}.safetensors"


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor to write."""

    parameters: tuple[str, ...]
    """Parameters whose rows it has, one after another."""
    name: str
    """Name in the file."""
    dtype: torch.dtype
    num_bytes: int
    index: int | None = None
    """Index along the parameter's first dimension. None: the full parameter."""


Plan = list[list[PlannedTensor]]
"""Tensors of each file."""


def export(
    checkpoint: Path, target: Path, *, settings: HFExport, group: dist.ProcessGroup | None
) -> None:
    """Write the weights of a checkpoint as the folder `target`, which is replaced if it exists.

    The ranks of `group` share the work. None: this process only. Raises CheckpointError if the
    checkpoint cannot be read or the folder not be written. Nothing at `target` was changed.
    """
    rank, num_ranks = (
        (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    )
    draft = draft_of(target)

    def check_and_plan() -> Plan:
        reader, names = TensorReader(checkpoint / "model"), settings.names
        has_adapter = settings.adapter is not None
        weights = [name for name in reader.entries if not (has_adapter and is_adapter(name))]
        unnamed = names.find_mismatch(weights)
        if problem := unnamed or find_inexpressible(names.architecture, names.format):
            raise CheckpointError(f"{checkpoint} cannot be exported to Hugging Face: {problem}")
        return plan_files(reader, settings=settings)

    def prepare() -> None:
        if draft.exists():  # from a process that died
            shutil.rmtree(draft)
        draft.mkdir(parents=True)

    def write_files() -> None:
        reader = TensorReader(checkpoint / "model")
        for number in range(rank, len(plan), num_ranks):
            file = draft / settings.file_name(number, num_files=len(plan))
            logger.info("Writing file %d of %d: %s", number + 1, len(plan), file.name)
            _write_file(file, plan[number], reader=reader, settings=settings)

    def complete() -> None:
        _write_other_files(checkpoint, target, plan, settings=settings)
        commit(target)
        note = ", merged with the LoRA adapter" if settings.adapter is not None else ""
        if settings.adapter_only:
            note = " of the LoRA adapter"
        logger.info("Saved %s for Hugging Face: %d tensors%s", target, sum(map(len, plan)), note)

    plan = on_first_rank(check_and_plan, group=group)
    try:
        on_first_rank(prepare, group=group)
        on_every_rank(write_files, group=group)
        on_first_rank(complete, group=group)
    except CheckpointError as error:
        on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True), group=group)
        raise CheckpointError(
            f"{target} could not be written: {error}; free space or fix the folder, and convert "
            f"{checkpoint} by torchtitan convert"
        ) from error


def plan_files(reader: TensorReader, *, settings: HFExport) -> Plan:
    """Distribute the tensors over files, in the order of the model: layer 10 after layer 9."""

    def order(name: str) -> list[tuple[int, str]]:
        return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]

    files: Plan = [[]]
    size = 0
    limit = math.inf if settings.adapter_only else settings.max_file_bytes  # PEFT reads one file
    for parameter in sorted(reader.entries, key=order):
        if settings.is_adapter(parameter) != settings.adapter_only:
            continue
        for tensor in _plan_tensors(parameter, reader.entries, settings=settings):
            if files[-1] and size + tensor.num_bytes > limit:
                files.append([])
                size = 0
            files[-1].append(tensor)
            size += tensor.num_bytes
    return files


def _plan_tensors(parameter: str, entries: Entries, *, settings: HFExport) -> list[PlannedTensor]:
    """Return the tensors of a parameter: one, or one per entry of its first dimension.

    A fused tensor is one of its first parameter, and none of the others.
    """
    names, parts = settings.names, [parameter]
    if settings.adapter_only and settings.adapter is not None:
        name = settings.adapter.to_hf(parameter, names=names)
    else:
        name = names.to_hf(parameter)
        parts = names.parts_of(name)
    if parameter != parts[0]:
        return []
    stored = [entry for part in parts if (entry := entries[part]) is not None]
    assert len(stored) == len(parts), f"{name} is not made of parameters only"
    shape = (
        sum(entry.shape[0] for entry in stored),
        *stored[0].shape[1:],
    )  # alternating ones too have this size
    if parameter in VOCABULARY:
        shape = (shape[0] + settings.add_tokens, *shape[1:])
    dtype = names.stored_dtype(parameter, settings.dtype or stored[0].dtype)
    stacked = [None] if EACH not in name else list(range(shape[0]))
    num_bytes = math.prod(shape) * dtype.itemsize // len(stacked)
    return [
        PlannedTensor(tuple(parts), name.replace(EACH, str(index)), dtype, num_bytes, index)
        for index in stacked
    ]


def _write_file(
    path: Path, tensors: Sequence[PlannedTensor], *, reader: TensorReader, settings: HFExport
) -> None:
    """Write a safetensors file."""
    weights: dict[str, Tensor] = {}
    # entries of a parameter are adjacent, so that it is read once for all of them
    for parameters, group in groupby(tensors, key=lambda tensor: tensor.parameters):
        entries = list(group)
        dtype = entries[0].dtype
        parts = [_read(n, dtype=dtype, reader=reader, settings=settings) for n in parameters]
        weight = parts[0] if len(parts) == 1 else torch.cat(parts)
        if any_layer(entries[0].name) in settings.names.format.alternating:
            rows = [part.mT if part.ndim > 2 else part for part in parts]
            weight = torch.stack(rows, -1).flatten(-2)
        for entry in entries:
            part = weight if entry.index is None else weight[entry.index]
            weights[entry.name] = part.contiguous()
    save_file(weights, path, metadata={"format": "pt"})
    with path.open("rb+") as file:
        os.fsync(file.fileno())


def _read(name: str, *, dtype: torch.dtype, reader: TensorReader, settings: HFExport) -> Tensor:
    """Return a full parameter with merged adapter, in the file's row order and type."""
    stored, adapter = reader.entries, settings.adapter
    factors: Sequence[str] = ()
    if adapter is not None and adapter.merge:
        factors = [factor for factor in adapter.factors_of(name) if factor in stored]
    entries = {name: entry for name in (name, *factors) if (entry := stored[name]) is not None}
    into = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
    fill(into, reader=reader, group=None)
    weight = into[name]
    if adapter is not None and factors:
        weight = adapter.merge_into(weight, *(into[factor] for factor in factors))
    if name in VOCABULARY:
        weight = add_rows(weight, settings.add_tokens)
    return to_their_rows(weight.to(dtype), heads=settings.names.rope_heads(name))


def _write_other_files(checkpoint: Path, target: Path, plan: Plan, *, settings: HFExport) -> None:
    """Write index, config, copied files and model card."""
    draft, architecture = draft_of(target), settings.names.architecture
    tensors = [tensor for file in plan for tensor in file]
    if len(plan) > 1:
        index = {
            tensor.name: settings.file_name(number, num_files=len(plan))
            for number, file in enumerate(plan)
            for tensor in file
        }
        size = sum(tensor.num_bytes for tensor in tensors)
        write_json(draft / INDEX, {"metadata": {"total_size": size}, "weight_map": index})
    if settings.adapter is not None and settings.adapter_only:
        names = [tensor.name for tensor in tensors]
        content = settings.adapter.config(names, num_layers=architecture.num_layers)
        write_json(draft / ADAPTER_CONFIG, content)
    else:
        format, dtype = settings.names.format, tensors[0].dtype
        content = new_config(architecture, format=format, dtype=dtype, carried=settings.carried)
        write_json(draft / CONFIG, content)
    copies = {name: source.read_bytes() for name, source in settings.files.items()}
    if settings.card is not None:
        card = target / CARD  # may have been edited by hand
        copies[CARD] = card.read_bytes() if card.is_file() else settings.card(checkpoint).encode()
    for name, content_bytes in copies.items():
        (draft / name).parent.mkdir(exist_ok=True)
        with HashingFile(draft / name) as file:  # closing it syncs it to disk
            file.write(content_bytes)
    if settings.generation is not None:
        write_json(draft / GENERATION_CONFIG, settings.generation)
