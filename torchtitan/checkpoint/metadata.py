"""What a DCP folder says of its tensors.

DCP's `.metadata` tells name, shape and type of each tensor, and in which file each piece of it
lies. It is read as plain data (`data_pickle.py`) and believed in nothing that can be checked: that
the pieces lie in the folder, are what is said of them, and make up the whole tensor. The tensors
themselves are read by `pieces.py`; DCP's entries of raw bytes, which are pickles again, are never
read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from math import prod
from pathlib import Path
from pickle import STOP
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.checkpoint.data_pickle import Place, load_records
from torchtitan.checkpoint.ranks import reason

METADATA = ".metadata"
_MAX_SPLIT = 6
"""Dimensions of a tensor that its pieces may split: each doubles the corners to look at."""


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
    return None if total == 0 or _tile(pieces, shape=entry.size) else "has pieces that overlap"


def _tile(pieces: list[ChunkStorageMetadata], *, shape: torch.Size) -> bool:
    """Tell whether each element lies in exactly one of the pieces.

    The indicator function of a box has mixed differences +1 or -1 at its corners and 0 elsewhere.
    So the pieces tile the shape if and only if their signed corners add up to those of the shape,
    which takes time in proportion to the pieces, however they lie. Pieces that split more than
    `_MAX_SPLIT` dimensions are taken to overlap.
    """
    num_dims, origin = len(shape), [0] * len(shape)
    begins_ND = _table([*(piece.offsets for piece in pieces), origin], num_dims)
    ends_ND = begins_ND + _table([*(piece.sizes for piece in pieces), shape], num_dims)
    signs_NC = np.where(np.arange(len(pieces) + 1) < len(pieces), 1, -1)[:, None]
    corners_NC, num_places = np.zeros_like(signs_NC), 1
    for dim, size in enumerate(shape):
        edges_2N = np.stack([begins_ND[:, dim], ends_ND[:, dim]])
        if (edges_2N == [[0], [size]]).all():  # not split
            continue
        known, places = np.unique(edges_2N, return_inverse=True)
        num_places *= len(known)
        if corners_NC.shape[1] >> _MAX_SPLIT or num_places >= 2**63:
            return False
        low_N1, high_N1 = places.reshape(edges_2N.shape)[..., None]
        corners_NC = corners_NC * len(known)
        corners_NC = np.concatenate([corners_NC + low_N1, corners_NC + high_N1], 1)
        signs_NC = np.concatenate([signs_NC, -signs_NC], 1)
    _, where = np.unique(corners_NC, return_inverse=True)
    return not np.bincount(where.ravel(), signs_NC.ravel()).any()


def _table(rows: Sequence[Sequence[int]], num_columns: int) -> npt.NDArray[np.int64]:
    # np.array takes 20 times as long for rows of torch.Size
    flat = np.fromiter(chain.from_iterable(rows), np.int64)
    return flat.reshape(len(rows), num_columns)
