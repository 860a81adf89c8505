"""What a DCP folder says of its tensors.

DCP's `.metadata` tells name, shape and type of each tensor, and in which file each piece of it
lies. It is read as plain data (`data_pickle.py`) and believed in nothing that can be checked: that
the pieces lie in the folder, are what is said of them, and make up the whole tensor. The tensors
themselves are read by `pieces.py`; DCP's entries of raw bytes, which are pickles again, are never
read.
"""

from __future__ import annotations

from itertools import combinations
from math import prod
from pathlib import Path
from pickle import STOP
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.data_pickle import Place, load_records
from torchtitan.checkpoint.files import check_is_file
from torchtitan.checkpoint.ranks import reason

METADATA = ".metadata"
_MAX_IRREGULAR = 2000
"""Pieces of a tensor that are compared one by one where they form no grid."""


def read_metadata(folder: Path) -> Metadata:
    """Return what DCP knows of the tensors in `folder`.

    Raises:
        CheckpointError: The file is missing or damaged, or names what a checkpoint has no use for.
    """
    path = folder / METADATA
    try:
        check_is_file(path)
        data = path.read_bytes()
        if not data.endswith(STOP):
            raise EOFError
        metadata = load_records(data)
        _check(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused, nothing in it was run: {error}") from error
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise CheckpointError(
            f"{path} cannot be read: {reason(error)}; use another checkpoint"
        ) from error
    return metadata


def _check(metadata: Any) -> None:
    """Refuse files outside of the folder, and anything between the file and the tensor."""
    if not isinstance(metadata, Metadata):
        raise CheckpointError(f"it holds a {type(metadata).__name__}, not DCP's metadata")
    num_pieces = 0
    for name, entry in metadata.state_dict_metadata.items():
        if not isinstance(name, str) or not isinstance(entry, _ENTRIES):
            raise CheckpointError(f"its entry {name!r} is neither a tensor nor raw bytes")
        if isinstance(entry, TensorStorageMetadata):
            num_pieces += len(entry.chunks)
            # one list may stand in many entries: count before any piece is looked at
            if num_pieces > len(metadata.storage_data):
                raise CheckpointError("its tensors have more pieces than there are places")
            for piece in entry.chunks:
                _check_piece(name, piece, shape=entry.size)
                if MetadataIndex(name, piece.offsets) not in metadata.storage_data:
                    raise CheckpointError(f"'{name}' has a piece that lies nowhere")
    for index, place in metadata.storage_data.items():
        if not isinstance(index, MetadataIndex) or not isinstance(place, Place):
            raise CheckpointError("it holds places of what is no tensor")
        file = place.relative_path
        if not isinstance(file, str) or Path(file).name != file or file == "..":
            shown = repr(file)[:60] if isinstance(file, str | int) else type(file).__name__
            raise CheckpointError(f"'{index.fqn}' lies in {shown}, which is no file beside it")
        if place.transform_descriptors:
            raise CheckpointError(f"'{index.fqn}' was transformed when it was saved")


_ENTRIES = (TensorStorageMetadata, BytesStorageMetadata)


def _check_piece(name: str, piece: Any, *, shape: torch.Size) -> None:
    if not isinstance(piece, ChunkStorageMetadata):
        raise CheckpointError(f"'{name}' has a {type(piece).__name__} for a piece")
    fits = len(piece.offsets) == len(piece.sizes) == len(shape) and all(
        min(offset, size) >= 0 and offset + size <= total
        for offset, size, total in zip(piece.offsets, piece.sizes, shape, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"'{name}' has a piece of {list(piece.sizes)} at {list(piece.offsets)}, outside of "
            f"its shape {list(shape)}"
        )


def is_tensor(entry: Any) -> bool:
    """Tell whether an entry of the metadata is a tensor, not raw bytes."""
    return isinstance(entry, TensorStorageMetadata)


def find_misses(entry: TensorStorageMetadata) -> str | None:
    """Say what keeps the pieces of a tensor from making it up; None: nothing does."""
    pieces = [piece for piece in entry.chunks if 0 not in piece.sizes]
    there, total = sum(prod(piece.sizes) for piece in pieces), prod(entry.size)
    if there < total:
        return f"has {there:,} of {total:,} elements ({there / total:.1%})"
    if _is_grid(pieces, shape=entry.size) or (there == total and not _overlaps(pieces)):
        return None
    return "has pieces that overlap"


def _is_grid(pieces: list[ChunkStorageMetadata], *, shape: torch.Size) -> bool:
    """Tell whether each piece is a cell of its own of the grid that they begin at."""
    ends = []
    for dim, size in enumerate(shape):
        starts = sorted({piece.offsets[dim] for piece in pieces})
        ends.append(dict(zip(starts, [*starts[1:], size], strict=True)))
    return len({piece.offsets for piece in pieces}) == len(pieces) and all(
        start + size == end[start]
        for piece in pieces
        for start, size, end in zip(piece.offsets, piece.sizes, ends, strict=True)
    )


def _overlaps(pieces: list[ChunkStorageMetadata]) -> bool:
    """Tell whether any two pieces overlap; of very many that form no grid it is assumed."""
    return len(pieces) > _MAX_IRREGULAR or any(
        all(
            max(i, j) < min(i + n, j + m)
            for i, n, j, m in zip(a.offsets, a.sizes, b.offsets, b.sizes, strict=True)
        )
        for a, b in combinations(pieces, 2)
    )
