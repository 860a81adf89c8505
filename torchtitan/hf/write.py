"""Writes a Hugging Face folder from a checkpoint, by all ranks together.

The source is the checkpoint on disk, not the ranks' memory: the weights are whole there in any
layout, so nothing is gathered, no GPU has to hold a full tensor, and the same code converts a
checkpoint long after its run. Each file of the folder is written by one rank from front to back, so
that a rank holds one parameter at a time. The price: a run reads its weights once more at its end.

The folder is there whole or not at all: it is written under another name, and renamed when every
rank is done.
"""

from __future__ import annotations

import json
import logging
import math
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import HashingFile, write_json
from torchtitan.checkpoint.reader import TensorReader, fill, is_tensor
from torchtitan.checkpoint.rows import to_their_rows
from torchtitan.checkpoint.storage import commit, draft_of
from torchtitan.hf.beside import GENERATION_CONFIG
from torchtitan.hf.card import CARD
from torchtitan.hf.config import find_unsaid, new_config
from torchtitan.hf.names import ADAPTER_CONFIG, ADAPTER_WEIGHTS, CONFIG, INDEX, WEIGHTS, Names
from torchtitan.mesh.ranks import on_every_rank, on_first_rank
from torchtitan.models.spec import EACH

logger = logging.getLogger(__name__)
MAX_FILE_BYTES = 5_000_000_000
DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_MAX_HEADER_BYTES = 100_000_000  # readers refuse longer ones


class Adapter(Protocol):
    """Tensors of a checkpoint that are no weights of the model but change some, as LoRA's."""

    @property
    def alone(self) -> bool:
        """Whether the folder holds only the adapter; else it is merged into the weights."""

    def owns(self, name: str) -> bool:
        """Tell whether a tensor of the checkpoint is the adapter's."""

    def parts_of(self, weight: str) -> Sequence[str]:
        """Return the names of the adapter's tensors that would change a weight."""

    def merge(self, weight: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return a weight as its parts change it."""

    def their_name(self, name: str, *, theirs: Callable[[str], str]) -> str:
        """Return what the files call a tensor of the adapter; `theirs` translates a weight."""

    def config(self, names: Sequence[str], *, num_layers: int) -> dict[str, Any]:
        """Return the adapter_config.json of an adapter of these tensors."""


@dataclass(frozen=True, kw_only=True)
class HFExport:
    """What a folder holds, beside the weights of the checkpoint."""

    names: Names
    dtype: torch.dtype | None = None
    """Type of the weights; None: as they are stored."""
    carried: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json beside the sizes."""
    files: Mapping[str, Path] = field(default_factory=dict)
    """Files to copy into the folder, by their names there: the tokenizer and what belongs to it."""
    generation: Mapping[str, Any] | None = None
    """The generation_config.json; None: the one among `files`, if there is one."""
    max_file_bytes: int = MAX_FILE_BYTES
    """Weights in one file at most; a tensor that is larger has a file of its own."""
    adapter: Adapter | None = None
    card: Callable[[Path], str] | None = None
    """Returns the text of the model card, given the step's folder; None: no card is written."""

    @property
    def adapter_alone(self) -> bool:
        """Whether only the adapter is written."""
        return self.adapter is not None and self.adapter.alone

    def is_adapters(self, name: str) -> bool:
        """Tell whether a tensor of the checkpoint is the adapter's."""
        return self.adapter is not None and self.adapter.owns(name)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """One tensor of the folder that is to be."""

    ours: str
    name: str
    """Theirs."""
    shape: tuple[int, ...]
    dtype: torch.dtype
    number: int | None = None
    """Which entry of ours along its first dimension it is; None: all of it."""

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
        check_names(checkpoint, reader.entries, settings=settings)
        reader.check_whole(reader.entries)
        return plan_files(reader, settings=settings)

    def prepare() -> None:
        if draft.exists():  # of a process that died
            shutil.rmtree(draft)
        draft.mkdir(parents=True)

    def write() -> None:
        with closing(TensorReader(checkpoint / "model")) as reader:
            for number in range(rank, len(plan), num_ranks):
                path = draft / file_name(number, num_files=len(plan), settings=settings)
                _write_file(path, plan[number], reader=reader, settings=settings)

    plan = on_first_rank(check_and_plan, group=group)
    try:
        on_first_rank(prepare, group=group)
        on_every_rank(write, group=group)
        on_first_rank(lambda: _complete(checkpoint, target, plan, settings), group=group)
    except CheckpointError as error:
        on_first_rank(lambda: shutil.rmtree(draft, ignore_errors=True), group=group)
        raise CheckpointError(
            f"{target} could not be written: {error}; make room or mend the "
            f"folder, and convert {checkpoint} by scripts/convert_hf.py"
        ) from error


def check_names(checkpoint: Path, stored: Collection[str], *, settings: HFExport) -> None:
    """Check that the folder would hold every parameter of a checkpoint, and all of its own."""
    names, weights = settings.names, [name for name in stored if not settings.is_adapters(name)]
    if (unsaid := find_unsaid(names.architecture, names.format)) is not None:
        raise CheckpointError(
            f"{checkpoint} must be of a model that Hugging Face's files can describe, no folder "
            f"was written: {unsaid}; export it as a model of another family, or keep it as it is"
        )
    if (misnamed := names.find_misnamed(weights)) is not None:
        raise CheckpointError(
            f"{checkpoint} must hold the parameters that Hugging Face's files of its family have, "
            f"no folder was written: {misnamed}; export it as the model that it is of, or give "
            f"that model's ModelSpec its names (hf)"
        )


def plan_files(reader: TensorReader, *, settings: HFExport) -> list[list[Planned]]:
    """Return the tensors of each file, in the order of the model."""
    files: list[list[Planned]] = [[]]
    size = 0
    limit = math.inf if settings.adapter_alone else settings.max_file_bytes  # PEFT reads one file
    for ours, entry in sorted(reader.entries.items(), key=lambda item: _in_order(item[0])):
        assert is_tensor(entry), f"{ours} is no parameter"
        if settings.is_adapters(ours) != settings.adapter_alone:
            continue
        whole = Planned(
            ours=ours,
            name=_their_name(ours, settings=settings),
            shape=tuple(entry.size),
            dtype=settings.names.dtype(ours, of_weights=settings.dtype or entry.properties.dtype),
        )
        for tensor in _each(whole) if EACH in whole.name else [whole]:
            if files[-1] and size + tensor.num_bytes > limit:
                files.append([])
                size = 0
            files[-1].append(tensor)
            size += tensor.num_bytes
    return files


def _each(whole: Planned) -> Iterator[Planned]:
    """Yield a tensor for each entry along the first dimension."""
    num, *shape = whole.shape
    for number in range(num):
        name = whole.name.replace(EACH, str(number))
        yield replace(whole, name=name, shape=tuple(shape), number=number)


def _their_name(ours: str, *, settings: HFExport) -> str:
    if settings.adapter is not None and settings.adapter.owns(ours):
        return settings.adapter.their_name(ours, theirs=settings.names.theirs)
    return settings.names.theirs(ours)


def _in_order(name: str) -> list[tuple[int, str]]:
    """Sort layer 10 behind layer 9."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def file_name(number: int, *, num_files: int, settings: HFExport) -> str:
    """Return the name of a file of weights, as transformers counts them."""
    if settings.adapter_alone:
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
        # entries of one parameter follow each other: it is read once for all of them
        for _, parts in groupby(tensors, key=lambda tensor: tensor.ours):
            first, *others = parts
            weight = _read(first, reader=reader, settings=settings)
            for part in (first, *others):
                file.write(_bytes_of(weight if part.number is None else weight[part.number]))


def _read(tensor: Planned, *, reader: TensorReader, settings: HFExport) -> Tensor:
    """Return the whole parameter of a tensor in their order of rows, in its new type."""
    stored = reader.entries
    adapter, parts = settings.adapter, [tensor.ours]
    if adapter is not None and not adapter.owns(tensor.ours):
        parts += [name for name in adapter.parts_of(tensor.ours) if name in stored]
    weights = {name: _empty_like(stored[name]) for name in parts}
    fill(weights, reader=reader, group=None)
    weight, *changes = weights.values()
    if adapter is not None and changes:
        weight = adapter.merge(weight, changes)
    return to_their_rows(weight.to(tensor.dtype), head_dim=settings.names.head_dim(tensor.ours))


def _empty_like(entry: Any) -> Tensor:
    return torch.empty(tuple(entry.size), dtype=entry.properties.dtype)


def _bytes_of(tensor: Tensor) -> memoryview:
    return memoryview(tensor.contiguous().view(torch.uint8).reshape(-1).numpy())


def _complete(
    checkpoint: Path, target: Path, plan: Sequence[Sequence[Planned]], settings: HFExport
) -> None:
    """Write index, config, the copied files and the card, and give the folder its name."""
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
    architecture, adapter = settings.names.architecture, settings.adapter
    if adapter is not None and adapter.alone:
        names = [tensor.name for tensor in tensors]
        about, content = ADAPTER_CONFIG, adapter.config(names, num_layers=architecture.num_layers)
    else:
        about = CONFIG
        content = new_config(
            architecture,
            format=settings.names.format,
            dtype=tensors[0].dtype,
            carried=settings.carried,
        )
    write_json(draft / about, content)
    for name, source in settings.files.items():
        with HashingFile(draft / name) as file:  # on disk when it is closed
            file.write(source.read_bytes())
    if settings.generation is not None:
        write_json(draft / GENERATION_CONFIG, settings.generation)
    if settings.card is not None:
        there = target / CARD  # perhaps edited by hand: kept
        text = there.read_bytes() if there.is_file() else settings.card(checkpoint).encode()
        with HashingFile(draft / CARD) as file:
            file.write(text)
    commit(target)
    logger.info("Saved %s for Hugging Face: %d tensors", target, len(tensors))
