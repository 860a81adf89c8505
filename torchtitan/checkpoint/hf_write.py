"""A Hugging Face folder made from a checkpoint, by all ranks together.

The checkpoint on disk is the source, not the ranks' memory: the weights are whole there whatever
the layout, so nothing is gathered, no GPU has to hold a full tensor, and the same code converts a
checkpoint long after its run. Each file of the folder is written by one rank, tensor by tensor,
from the front to the back, so that a rank holds one tensor at a time. The price is reading the
weights once more, which a run pays at its end.

The folder is there whole or not at all: it is written beside, and renamed when every rank is done.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.files import HashingFile, write_json
from torchtitan.checkpoint.folders import commit, draft_of
from torchtitan.checkpoint.hf import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    WEIGHTS,
    find_misnamed,
    head_dim_of_rows,
    their_name,
    to_their_rows,
)
from torchtitan.checkpoint.hf_config import new_config
from torchtitan.checkpoint.hf_lora import (
    ADAPTER_WEIGHTS,
    Factors,
    adapter_config,
    factor_name,
    factors_of,
    weight_beside,
)
from torchtitan.checkpoint.metadata import TensorReader
from torchtitan.checkpoint.ranks import on_every_rank, on_first_rank
from torchtitan.models.lora import is_factor, merged
from torchtitan.models.spec import DecoderConfig, HFFormat

logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 5_000_000_000
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_MAX_HEADER_BYTES = 100_000_000  # readers refuse longer ones


@dataclass(frozen=True, kw_only=True)
class HFExport:
    """How a model goes into a folder of Hugging Face."""

    names: HFFormat
    architecture: DecoderConfig
    dtype: torch.dtype | None = None
    """Type of the weights; None: as they are stored."""
    carried: Mapping[str, Any] = field(default_factory=dict)
    """What config.json says beside the sizes."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy into the folder, as those of the tokenizer, by their names there."""
    max_file_bytes: int = MAX_FILE_BYTES
    """Weights in one file at most; a tensor that is larger has a file of its own."""
    factors: Factors | None = None
    """What becomes of low-rank factors; None: there are none."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One tensor of the folder that is to be."""

    ours: str
    name: str
    """Theirs."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        """Return its size in the file."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize


def export(
    checkpoint: Path, target: Path, *, settings: HFExport, group: dist.ProcessGroup | None
) -> None:
    """Write the weights of a checkpoint's step as the folder `target`, in place of one before.

    `group` are the ranks that share the work; None is this process alone.

    Raises:
        CheckpointError: The checkpoint cannot be read or the folder not be written; nothing at
            `target` was changed.
    """
    rank, num_ranks = (
        (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    )
    draft = draft_of(target)

    def check_and_plan() -> list[list[Planned]]:
        reader = TensorReader(checkpoint / "model")
        stored = reader.read_metadata().state_dict_metadata
        check_names(checkpoint, stored, settings=settings)
        reader.check_whole(stored)
        return plan_files(reader, settings=settings)

    def prepare() -> None:
        if draft.exists():  # of a process that died
            shutil.rmtree(draft)
        draft.mkdir(parents=True)

    def write() -> None:
        reader = TensorReader(checkpoint / "model")
        for number in range(rank, len(plan), num_ranks):
            path = draft / file_name(number, num_files=len(plan), settings=settings)
            _write_file(path, plan[number], reader=reader, settings=settings)

    plan = on_first_rank(check_and_plan, group=group)
    try:
        on_first_rank(prepare, group=group)
        on_every_rank(write, group=group)
        on_first_rank(lambda: _complete(target, plan, settings=settings), group=group)
    except CheckpointError as error:
        on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True), group=group)
        raise CheckpointError(
            f"{target} could not be written: {error}; make room or mend the "
            f"folder, and convert {checkpoint} by scripts/convert_hf.py"
        ) from error


def check_names(checkpoint: Path, stored: Collection[str], *, settings: HFExport) -> None:
    """Check that the folder would hold every parameter of a checkpoint, and lack none of its own.

    Raises:
        CheckpointError: Says which it would not hold, or lack.
    """
    misnamed = find_misnamed(
        [name for name in stored if not is_factor(name)],
        names=settings.names,
        num_layers=settings.architecture.num_layers,
        tied=settings.architecture.tie_embeddings,
    )
    if misnamed is not None:
        raise CheckpointError(
            f"{checkpoint} must hold the parameters that a {settings.names.architecture} has, no "
            f"folder was written: {misnamed}; export it as the model that it is of, or give that "
            f"model's ModelSpec its names (hf)"
        )


def plan_files(reader: TensorReader, *, settings: HFExport) -> list[list[Planned]]:
    """Return the tensors of each file, in the order of the model."""
    files: list[list[Planned]] = [[]]
    size = 0
    alone = settings.factors is not None and settings.factors.alone
    limit = math.inf if alone else settings.max_file_bytes  # PEFT reads one file
    stored = reader.read_metadata().state_dict_metadata
    for ours, entry in sorted(stored.items(), key=lambda item: _in_order(item[0])):
        assert storage.is_tensor(entry), f"{ours} is no parameter"
        if settings.factors is not None and is_factor(ours) != settings.factors.alone:
            continue
        named = factor_name if is_factor(ours) else their_name
        tensor = Planned(
            ours=ours,
            name=named(ours, names=settings.names),
            shape=tuple(entry.size),
            dtype=settings.dtype or entry.properties.dtype,
        )
        if files[-1] and size + tensor.num_bytes > limit:
            files.append([])
            size = 0
        files[-1].append(tensor)
        size += tensor.num_bytes
    return files


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def file_name(number: int, *, num_files: int, settings: HFExport) -> str:
    """Return the name of a file of weights, as transformers counts them."""
    if settings.factors is not None and settings.factors.alone:
        return ADAPTER_WEIGHTS
    return WEIGHTS if num_files == 1 else f"model-{number + 1:05}-of-{num_files:05}.safetensors"


def _write_file(
    path: Path, tensors: Sequence[Planned], *, reader: TensorReader, settings: HFExport
) -> None:
    """Write a safetensors file: the length of the header, the header, and the tensors."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for tensor in tensors:
        begin, end = end, end + tensor.num_bytes
        header[tensor.name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": tensor.shape,
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the numbers are aligned
    assert len(text) <= _MAX_HEADER_BYTES
    with HashingFile(path) as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        for tensor in tensors:
            file.write(_bytes_of(_read(tensor, reader=reader, settings=settings)))


def _read(tensor: Planned, *, reader: TensorReader, settings: HFExport) -> Tensor:
    """Return a whole tensor in their order of rows, in its new type."""
    stored = reader.read_metadata().state_dict_metadata
    parts = [tensor.ours]
    if settings.factors is not None and not is_factor(tensor.ours):
        parts += [name for name in factors_of(tensor.ours) if name in stored]
    weights = {name: _empty_like(stored[name]) for name in parts}
    try:
        with warnings.catch_warnings():
            # one process is what is meant here
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            dcp.load(weights, storage_reader=reader, no_dist=True)
    except CheckpointException as error:  # no Exception: other ranks would not hear of it
        raise CheckpointError(storage.reasons(error)) from error
    weight, *factors = weights.values()
    if factors:
        assert settings.factors is not None
        weight = merged(weight, *factors, scale=settings.factors.scale)
    rows_of = weight_beside(tensor.ours)
    head_dim = None
    if rows_of is not None:
        head_dim = head_dim_of_rows(
            rows_of, names=settings.names, architecture=settings.architecture
        )
    return to_their_rows(weight.to(tensor.dtype), head_dim=head_dim)


def _empty_like(entry: Any) -> Tensor:
    return torch.empty(tuple(entry.size), dtype=entry.properties.dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).reshape(-1).numpy())


def _complete(target: Path, plan: Sequence[Sequence[Planned]], *, settings: HFExport) -> None:
    """Write what is no weights, and give the folder its name."""
    draft = draft_of(target)
    tensors = [tensor for file in plan for tensor in file]
    if len(plan) > 1:
        places = {
            tensor.name: file_name(number, num_files=len(plan), settings=settings)
            for number, file in enumerate(plan)
            for tensor in file
        }
        size = sum(tensor.num_bytes for tensor in tensors)
        write_json(draft / INDEX, {"metadata": {"total_size": size}, "weight_map": places})
    if settings.factors is not None and settings.factors.alone:
        names = [tensor.name for tensor in tensors]
        config = adapter_config(
            settings.factors, names, num_layers=settings.architecture.num_layers
        )
        write_json(draft / ADAPTER_CONFIG, config)
    else:
        config = new_config(
            settings.architecture,
            names=settings.names,
            dtype=tensors[0].dtype,
            carried=settings.carried,
        )
        write_json(draft / CONFIG, config)
    for name, source in settings.files.items():
        with HashingFile(draft / name) as file:  # on disk when it is closed
            file.write(source.read_bytes())
    commit(target)
    logger.info("Saved %s for Hugging Face: %d tensors", target, len(tensors))
