"""Hugging Face tensors as a source of weights: each rank reads the parts of its own shards.

A parameter is stored as one tensor, as one tensor per entry of its first dimension (experts), or as
some rows of a tensor that it shares with others (fused).
DeepSeek's matrices are in float8 with a scale per block of 128 x 128. They are multiplied by their
scales in float32 and rounded once, to the type of the parameter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from math import ceil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.reader import Piece, PieceReader, TensorEntry, fill
from torchtitan.checkpoint.reader import check_match as check_tensors
from torchtitan.checkpoint.rows import Heads
from torchtitan.checkpoint.source import ParameterFilter
from torchtitan.data.sampler import Permutation
from torchtitan.hf.names import Names, Slot, any_layer
from torchtitan.mesh.ranks import reason

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of weights by their names in safetensors."""
COVARIANCE_SCALE = 1e-9
"""Factor of the old rows' covariance in new rows of a vocabulary, as in transformers."""
NIBBLES, EXPONENTS = "_blocks", "_scales"
"""Endings of the names of MXFP4's two tensors: 32 numbers in 16 bytes, and their exponent."""
FLOAT4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The numbers of four bits (E2M1)."""
FLOAT8, SCALE = "F8_E4M3", "_scale_inv"
"""Type of a matrix with scales, and the ending of their tensor's name."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor on disk, some of its rows, or several tensors that are stacked."""

    name: str
    """Name in the file."""
    shape: tuple[int, ...]
    dtype: str
    """Type by its name in safetensors."""
    first_row: int = 0
    """Row of the tensor in the file where this one begins."""
    rope_heads: Heads | None = None
    """Heads if the rows are in half-split order."""
    alternate: tuple[int, int] | None = None
    """Number of this part and of all parts that alternate along the last dimension."""
    file: str = ""
    """Name of the file in the folder."""
    parts: tuple[StoredTensor, ...] = ()
    """Tensors that are stacked along a new first dimension. Empty if this is one tensor."""
    scale: StoredTensor | None = None
    """Factors of the blocks of a float8 matrix."""
    block: tuple[int, int] = (1, 1)
    """Rows and columns of a block."""


def add_once(
    by_slot: dict[Slot, StoredTensor], slot: Slot, tensor: StoredTensor, *, path: Path
) -> None:
    """Add a tensor; raise CheckpointError if another one fills the same parameter."""
    if slot in by_slot:
        raise CheckpointError(
            f"{path} must store '{slot[0]}' once, got '{by_slot[slot].name}' and '{tensor.name}'"
        )
    by_slot[slot] = tensor


def split_fused(
    path: Path,
    by_slot: Mapping[Slot, StoredTensor],
    *,
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
) -> dict[Slot, StoredTensor]:
    """Return the tensors with the rows of fused ones by parameter; raise CheckpointError if they
    are not as many as those of the parameters, whose `shapes` are given."""
    num_rows = {any_layer(name): shape[0] for name, shape in shapes.items()}
    split: dict[Slot, StoredTensor] = {}
    for slot, tensor in by_slot.items():
        parts = names.parts_of(tensor.name)
        if any_layer(tensor.name) in names.format.alternating:
            if len(tensor.shape) < 2 or tensor.shape[-1] % len(parts):
                rule = f"must end with a multiple of {len(parts)}, got shape {[*tensor.shape]}"
                raise CheckpointError(f"{path}: '{tensor.name}' {rule}")
            experts, *columns, last = tensor.shape
            for number, part in enumerate(parts):
                shape = (experts, last // len(parts), *columns)
                own = replace(tensor, shape=shape, alternate=(number, len(parts)))
                add_once(split, (part, None), own, path=path)
            continue
        if len(parts) < 2:
            add_once(split, slot, tensor, path=path)
            continue
        ends = [*accumulate((num_rows[any_layer(part)] for part in parts), initial=0)]
        if tensor.shape[:1] != (ends[-1],):
            raise CheckpointError(
                f"{path}: '{tensor.name}' must have {ends[-1]} rows, those of {', '.join(parts)}, "
                f"got shape {[*tensor.shape]}"
            )
        for part, (first, end) in zip(parts, pairwise(ends), strict=True):
            shape, heads = (end - first, *tensor.shape[1:]), names.rope_heads(part)
            rows = replace(tensor, shape=shape, first_row=first, rope_heads=heads)
            add_once(split, (part, None), rows, path=path)
    return split


def stack_parts(path: Path, by_slot: Mapping[Slot, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors by parameter; combine those that are entries of one parameter; raise
    CheckpointError if an entry is missing, or entries have different shapes or types."""
    stacked = {name: tensor for (name, index), tensor in by_slot.items() if index is None}
    entries: dict[str, dict[int, StoredTensor]] = defaultdict(dict)
    for (name, index), tensor in by_slot.items():
        if index is not None:
            entries[name][index] = tensor
    for name, by_index in entries.items():
        parts = tuple(by_index[index] for index in sorted(by_index))
        kinds = {(part.shape, part.dtype) for part in parts}
        missing = sorted(set(range(len(parts))) - by_index.keys())
        if missing or len(kinds) > 1 or name in stacked:
            got = "two copies" if name in stacked else " and ".join(map(str, sorted(kinds)))
            raise CheckpointError(
                f"{path}: '{name}' must be one tensor, or tensors of one shape and type numbered "
                f"from 0, got '{parts[0].name}' with "
                + (f"number {missing[0]} missing" if missing else got)
            )
        [(shape, dtype)] = kinds
        shape = (len(parts), *shape)
        stacked[name] = StoredTensor(name=parts[0].name, shape=shape, dtype=dtype, parts=parts)
    return stacked


def attach_scales(
    path: Path,
    by_slot: Mapping[Slot, StoredTensor],
    scales: Mapping[str, StoredTensor],
    *,
    block: tuple[int, int],
) -> dict[Slot, StoredTensor]:
    """Return the tensors with the float8 matrices as float32 matrices with scales; raise
    CheckpointError if scales are missing or have a wrong shape or type."""
    scaled = dict(by_slot)
    for slot, tensor in by_slot.items():
        if tensor.dtype != FLOAT8:
            continue
        scale = scales.get(f"{tensor.name}{SCALE}")
        expected = tuple(ceil(n / size) for n, size in zip(tensor.shape, block, strict=False))
        if scale is None or scale.shape != expected or scale.dtype not in DTYPES:
            got = "none" if scale is None else f"{scale.dtype} {list(scale.shape)}"
            raise CheckpointError(
                f"{path}: '{tensor.name}{SCALE}' must have shape {list(expected)}, one scale per "
                f"block of {block[0]} x {block[1]}, got {got}"
            )
        scaled[slot] = replace(tensor, dtype="F32", scale=scale, block=block)
    return scaled


def attach_exponents(
    path: Path, by_slot: Mapping[Slot, StoredTensor], scales: Mapping[str, StoredTensor]
) -> dict[Slot, StoredTensor]:
    """Return the tensors with MXFP4's packed matrices as float32 matrices; raise CheckpointError if
    exponents are missing or have a wrong shape or type."""
    scaled = dict(by_slot)
    for slot, tensor in by_slot.items():
        if tensor.dtype != "U8" or len(tensor.shape) != 3:
            continue  # is refused by its type
        scale, (experts, width, rows) = scales.get(tensor.name + EXPONENTS), tensor.shape
        expected = experts, rows, width // 32
        if width % 32 or scale is None or (scale.shape, scale.dtype) != (expected, "U8"):
            got = "none" if scale is None else f"{scale.dtype} {[*scale.shape]}"
            raise CheckpointError(
                f"{path}: '{tensor.name}{EXPONENTS}' must be U8 {[*expected]}, one exponent per 32 "
                f"numbers, got {got}"
            )
        scaled[slot] = replace(tensor, dtype="F32", scale=scale, block=(1, 32))
    return scaled


@contextmanager
def open_slice(path: Path, stored: StoredTensor) -> Iterator[Any]:
    """Open a tensor of a folder. Slices of the result are tensors."""
    try:
        # opened for each tensor: pages that were read stay mapped, and count as memory, until then
        with safe_open(path / stored.file, framework="pt") as opened:
            yield opened.get_slice(stored.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path / stored.file} cannot be read: {reason(error)}") from error


@dataclass(frozen=True, kw_only=True)
class HFWeights:
    """A `WeightSource` whose tensors were compared with the job's model."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    """Tensors by parameter; those without one by their own name."""
    filter: ParameterFilter
    group: dist.ProcessGroup | None
    """Ranks that read together. None: this process only."""

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Return the shapes of all tensors."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill parameters in place, each in its own type; raise CheckpointError if a file is
        missing or damaged."""
        wanted = self.filter.wanted(into, names=self.shapes)
        fill(
            wanted,
            reader=_HFReader(self),
            group=self.group,
            rope_heads=lambda name: self.tensors[name].rope_heads,
        )


class _HFReader(PieceReader):
    """Reader whose pieces are the tensors of the files."""

    def __init__(self, source: HFWeights) -> None:
        self._tensors = source.tensors
        stored = {name: t for name, t in source.tensors.items() if t.dtype in DTYPES}
        super().__init__(source.path, {name: _entry(tensor) for name, tensor in stored.items()})

    @contextmanager
    def open_piece(self, name: str, piece: Piece) -> Iterator[Any]:
        """Open a tensor."""
        stored = self._tensors[name]
        is_stacked = bool(stored.parts)
        if is_stacked:
            stored = stored.parts[piece.offsets[0]]
        with ExitStack() as stack:
            is_packed = stored.scale is not None and stored.scale.name.endswith(EXPONENTS)
            in_file = replace(stored, name=stored.name + NIBBLES) if is_packed else stored
            opened = stack.enter_context(open_slice(self.path, in_file))
            if stored.scale is not None:
                scale = stack.enter_context(open_slice(self.path, stored.scale))
                if is_packed:
                    opened = PackedMatrices(opened, scale)
                else:
                    opened = ScaledMatrix(opened, scale, block=stored.block)
            if stored.alternate is not None:
                opened = _Alternating(opened, *stored.alternate)
            yield _StackedEntry(opened) if is_stacked else opened


def _entry(tensor: StoredTensor) -> TensorEntry:
    start, shape, skipped = (0,) * len(tensor.shape), tensor.shape, tensor.first_row
    # the piece is the tensor in the file, which may begin before our first row
    pieces = [Piece((-skipped, *start[1:]), (skipped + shape[0], *shape[1:]), tensor.file)]
    if tensor.parts:
        pieces = [
            Piece((index, *start[1:]), (1, *shape[1:]), part.file)
            for index, part in enumerate(tensor.parts)
        ]
    return TensorEntry(shape, DTYPES[tensor.dtype], tuple(pieces))


class _StackedEntry:
    """A tensor as the only entry along a new first dimension."""

    def __init__(self, opened: Any) -> None:
        self._opened = opened

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        part: Tensor = self._opened[region[1:]]
        return part[None]


class _Alternating:
    """One of `count` parts that alternate along the last dimension, as rows of experts."""

    def __init__(self, opened: Any, number: int, count: int) -> None:
        self._opened, self._number, self._count = opened, number, count

    def __getitem__(self, region: tuple[slice, ...]) -> Tensor:
        experts, rows, *columns = region
        alternating = slice(rows.start * self._count, rows.stop * self._count)
        stored = (experts, *columns, alternating)
        part: Tensor = self._opened[stored][..., self._number :: self._count]
        return part.mT if columns else part


class ScaledMatrix:
    """A float8 matrix and its scales. Slices are float32 products of both.

    Only the scales of the blocks that a slice overlaps are read.
    """

    def __init__(self, weight: Any, scale: Any, *, block: tuple[int, int]) -> None:
        self._weight, self._scale, self._block = weight, scale, block

    def __getitem__(self, region: Sequence[slice]) -> Tensor:
        rows, cols = region
        height, width = self._block
        part: Tensor = self._weight[rows, cols].float()
        top, left = rows.start // height, cols.start // width
        scale: Tensor = self._scale[top : ceil(rows.stop / height), left : ceil(cols.stop / width)]
        skipped = cols.start - left * width
        for number, row in enumerate(scale.float(), start=top):
            first = max(number * height - rows.start, 0)
            last = (number + 1) * height - rows.start
            part[first:last] *= row.repeat_interleave(width)[skipped:][: part.shape[1]]
        return part


class PackedMatrices:
    """MXFP4 matrices of experts (E, R, C / 32, 16) and exponents (E, R, C / 32).

    Slices are of the float32 matrices (E, C, R). Only the blocks that a slice overlaps are read.
    """

    def __init__(self, nibbles: Any, exponents: Any) -> None:
        self._nibbles, self._exponents = nibbles, exponents

    def __getitem__(self, region: tuple[slice, slice, slice]) -> Tensor:
        experts, columns, rows = region
        first = columns.start // 32
        blocks = slice(first, ceil(columns.stop / 32))
        packed: Tensor = self._nibbles[experts, rows, blocks]
        pairs = torch.stack((packed & 15, packed >> 4), -1).flatten(-2)
        exponents: Tensor = self._exponents[experts, rows, blocks]
        numbers = torch.tensor(FLOAT4)[pairs.int()]
        exact = torch.ldexp(numbers, exponents.int()[..., None] - 127).flatten(-2)
        return exact[..., columns.start - 32 * first : columns.stop - 32 * first].mT


def add_rows(weight_VD: Tensor, num_rows: int) -> Tensor:
    """Return a vocabulary's matrix with `num_rows` rows appended, near the mean of the old rows.

    Rows from the distribution of a new model have another length than trained ones, so that their
    logits are far off. transformers' resize_token_embeddings draws new rows from a normal
    distribution with the mean of the old rows and 1e-9 times their covariance. Here new row k is

        mean + sqrt(1e-9) (x - mean)

    where x is old row k of a fixed permutation: V new rows have exactly that mean and covariance.
    """
    if not num_rows:
        return weight_VD
    x_VD, num_old = weight_VD.double(), len(weight_VD)
    order = Permutation(num_old, seed=0, epoch=0, source=0)
    picked = [order[row % num_old] for row in range(num_rows)]
    mean_D = x_VD.mean(0)
    new = mean_D + COVARIANCE_SCALE**0.5 * (x_VD[picked] - mean_D)
    return torch.cat([weight_VD, new.to(weight_VD.dtype)])


def check_match(
    path: Path,
    by_slot: Mapping[str, StoredTensor],
    *,
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
    filter: ParameterFilter,
) -> None:
    """Raise CheckpointError if names, shapes or types of tensors differ from the model's."""

    def both_names(name: str) -> str:
        hf_name = by_slot[name].name if name in by_slot else names.to_hf(name)
        return f"'{name}'" if name == hf_name else f"'{name}' ({hf_name})"

    check_tensors(
        path,
        {name: (tensor.shape, tensor.dtype) for name, tensor in by_slot.items()},
        {name: (shape, DTYPES) for name, shape in shapes.items() if not filter.excludes(name)},
        may_skip=filter.excludes,
        spell=both_names,
    )
