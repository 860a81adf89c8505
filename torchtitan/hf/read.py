"""Weights by Hugging Face's names as a source, read by each rank straight into its own shards."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.reader import PieceReader, fill
from torchtitan.checkpoint.source import ParameterFilter
from torchtitan.hf.blocks import FLOAT8, SCALE, Blocks, Scaled
from torchtitan.hf.names import Names, Place
from torchtitan.mesh.ranks import reason
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of weights that can be read, as they are; `blocks.py` has another."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor on disk."""

    name: str
    """Its name there."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it."""
    head_dim: int | None
    """Width of the heads whose rows lie in halves; None: they lie as ours."""
    file: str = ""
    """Its file in the folder."""
    parts: tuple[StoredTensor, ...] = ()
    """Of a parameter with a tensor for each entry along its first dimension: these tensors."""
    scale: StoredTensor | None = None
    """What its blocks are multiplied by."""
    blocks: Blocks = (1, 1)
    """Rows and columns of one."""


def stack(path: Path, found: Mapping[Place, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by our names, those that are entries of one parameter as one.

    Raises:
        CheckpointError: One of them is missing, or there are several kinds.
    """
    stacked = {ours: tensor for (ours, number), tensor in found.items() if number is None}
    entries: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
    for (ours, number), tensor in found.items():
        if number is not None:
            entries[ours][number] = tensor
    for ours, numbered in entries.items():
        parts = tuple(numbered[number] for number in sorted(numbered))
        kinds = {(part.shape, part.dtype) for part in parts}
        missing = [due for due, number in enumerate(sorted(numbered)) if due != number]
        if missing or len(kinds) > 1 or ours in stacked:
            wrong = f"no number {missing[0]}" if missing else " and ".join(map(str, sorted(kinds)))
            raise CheckpointError(
                f"{path} must hold '{ours}' once, as one tensor or as tensors numbered from 0 on, "
                f"of one shape and type, got {wrong} beside '{parts[0].name}'; get it again"
            )
        [(shape, dtype)] = kinds
        whole = (len(parts), *shape)
        stacked[ours] = StoredTensor(
            name=parts[0].name, shape=whole, dtype=dtype, head_dim=None, parts=parts
        )
    return stacked


def attach_scales(
    path: Path,
    found: Mapping[Place, StoredTensor],
    scales: Mapping[str, StoredTensor],
    *,
    blocks: Blocks,
) -> dict[Place, StoredTensor]:
    """Give the matrices in float8 their scales, by their names: they are then read as float32.

    Raises:
        CheckpointError: A matrix has none, or they do not fit it.
    """
    whole = {}
    for place, tensor in found.items():
        if tensor.dtype == FLOAT8:
            scale = scales.get(f"{tensor.name}{SCALE}")
            due = tuple(ceil(n / size) for n, size in zip(tensor.shape, blocks, strict=False))
            if scale is None or scale.shape != due or scale.dtype not in DTYPES:
                got = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
                raise CheckpointError(
                    f"{path} must hold a scale for each block of {blocks[0]} x {blocks[1]} of "
                    f"'{tensor.name}', {list(due)} of them under '{tensor.name}{SCALE}', got "
                    f"{got}; get the folder again"
                )
            tensor = replace(tensor, dtype="F32", scale=scale, blocks=blocks)
        whole[place] = tensor
    return whole


Open = Callable[[Path, StoredTensor], AbstractContextManager[Any]]
"""Opens a tensor below a path; slices of the result are tensors."""


@contextmanager
def open_slice(path: Path, stored: StoredTensor) -> Iterator[Any]:
    """Open a tensor of a folder."""
    try:
        # opened anew for each: what was read stays mapped, and counts as memory, until then
        with safe_open(path / stored.file, framework="pt") as opened:
            yield opened.get_slice(stored.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path / stored.file} cannot be read: {reason(error)}") from error


@dataclass(frozen=True, kw_only=True)
class HFWeights:
    """Weights whose headers fit the job's model: a `WeightSource`."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    """By our names; those that we have no name for, by theirs."""
    filter: ParameterFilter
    group: dist.ProcessGroup | None
    open_tensor: Open = open_slice

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self.tensors.keys()

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill the selected parameters in place, each in its own type.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        wanted = self.filter.wanted(into, names=self.names)
        reader = _Reader(self)
        reader.grow({name: tensor.shape for name, tensor in wanted.items()})
        reader.read_half_split_rope(
            {name: tensor.head_dim for name, tensor in reader.stored.items()}
        )
        fill(wanted, reader=reader, group=self.group)


class _Reader(PieceReader):
    """Each tensor of the files is one piece."""

    def __init__(self, source: HFWeights) -> None:
        self.stored = {name: t for name, t in source.tensors.items() if t.dtype in DTYPES}
        self._open_tensor = source.open_tensor
        entries = {name: _in_pieces(tensor) for name, tensor in self.stored.items()}
        places = {
            MetadataIndex(name, chunk.offsets): piece
            for name, tensor in self.stored.items()
            for chunk, piece in zip(entries[name].chunks, tensor.parts or (tensor,), strict=True)
        }
        super().__init__(source.path, Metadata(dict(entries), storage_data=places))

    @contextmanager
    def open_piece(self, index: MetadataIndex) -> Iterator[Any]:
        """Open a tensor."""
        path, stored = Path(self.path), self.storage_data[index]
        with ExitStack() as stack:
            opened = stack.enter_context(self._open_tensor(path, stored))
            if stored.scale is not None:
                scale = stack.enter_context(self._open_tensor(path, stored.scale))
                opened = Scaled(opened, scale, blocks=stored.blocks)
            yield _Entry(opened) if self.stored[index.fqn].parts else opened


class _Entry:
    """A tensor as the only entry along one more dimension, the first."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __getitem__(self, places: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._opened[places[1:]]
        return part[None]


def _in_pieces(tensor: StoredTensor) -> TensorStorageMetadata:
    size = torch.Size(tensor.shape)
    begin = torch.Size([0] * len(size))
    chunks = [ChunkStorageMetadata(offsets=begin, sizes=size)]
    if tensor.parts:
        one = torch.Size([1, *size[1:]])
        chunks = [
            ChunkStorageMetadata(offsets=torch.Size([number, *begin[1:]]), sizes=one)
            for number in range(len(tensor.parts))
        ]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]), size=size, chunks=chunks
    )


def check_fit(
    path: Path,
    found: Mapping[str, StoredTensor],
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    filter: ParameterFilter,
) -> None:
    """Compare the selected names, shapes and types with those of the model."""
    names = Names(spec.hf, architecture)

    def both(name: str) -> str:
        # patterns go by our name, and a look into the folder by theirs
        theirs = found[name].name if name in found else names.theirs(name)
        return f"'{name}'" if name == theirs else f"'{name}' ({theirs})"

    storage.check_match(
        path,
        {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()},
        {
            name: (tuple(parameter.shape), DTYPES)
            for name, parameter in spec.build_meta(architecture).named_parameters()
            if not filter.excludes(name)
        },
        may_skip=filter.excludes,
        may_grow=filter.may_grow,
        spell=both,
    )
