"""What a DCP folder says of its tensors, and the reading of them, piece by piece.

DCP's `.metadata` tells name, shape and type of each tensor, and in which file each piece of it
lies. It is read as plain data (`data_pickle.py`) and believed in nothing that can be checked: that
the pieces lie in the folder, are what is said of them, and make up the whole tensor. The tensors
themselves are read by torch.load(weights_only=True); DCP's entries of raw bytes, which are pickles
again, are never read.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from math import prod
from pathlib import Path
from pickle import STOP
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan.base.errors import CheckpointError
from torchtitan.base.log import amount
from torchtitan.checkpoint.data_pickle import Place, load_records
from torchtitan.checkpoint.files import check_is_file
from torchtitan.checkpoint.ranks import reason
from torchtitan.checkpoint.rows import Places, overlap

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


def _misses(entry: TensorStorageMetadata) -> str | None:
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


class TensorReader(dcp.FileSystemReader):
    """Reads tensors, and tensors alone, from a DCP folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._metadata = read_metadata(folder)
        self._in_halves: dict[str, tuple[int, list[ChunkStorageMetadata]]] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once."""
        if not isinstance(self._metadata.storage_meta, StorageMeta):
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def check_whole(self, names: Collection[str]) -> None:
        """Refuse tensors of which a part is stored alone: the rest would stay as it is.

        Raises:
            CheckpointError: Names each, how much of it is there, and the likely reason.
        """
        entries = self._metadata.state_dict_metadata
        found = {name: _misses(entries[name]) for name in names if is_tensor(entries.get(name))}
        wrong = sorted(f"'{name}' {what}" for name, what in found.items() if what is not None)
        if wrong:
            raise CheckpointError(
                f"{self.path} must hold every element of a tensor once, got "
                f"{amount(len(wrong), 'tensor')} otherwise:\n  "
                + "; ".join(wrong[:8])
                + (" ..." if len(wrong) > 8 else "")
                + "\nwhere a part is missing, likely one of several ranks saved its own part alone "
                "(dcp.save with no_dist, or not called on all of them); save it again from all "
                "ranks, or leave these out: checkpoint.exclude_from_loading"
            )

    def turn_halves(self, head_dims: Mapping[str, int]) -> None:
        """Read the rows of these tensors as heads in halves, each of so many rows (`rows.py`)."""
        entries = self._metadata.state_dict_metadata
        for name, head_dim in head_dims.items():
            entry = entries[name]
            assert isinstance(entry, TensorStorageMetadata)
            self._in_halves[name] = head_dim, entry.chunks
            # to DCP one piece: which ones a rank needs follows from the order of rows
            whole = ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)
            entries[name] = replace(entry, chunks=[whole])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for, file by file.

        Raises:
            CheckpointError: Names the file that is missing, damaged or refused.
        """
        by_file: dict[str, list[tuple[ReadItem, MetadataIndex, list[Places]]]] = defaultdict(list)
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(f"'{item.storage_index.fqn}' is raw bytes, not a tensor")
            for piece, places in self._pieces(item):
                by_file[self.storage_data[piece].relative_path].append((item, piece, places))
        for name, parts in by_file.items():
            try:
                self._read_file(Path(self.path) / name, parts, planner)
            except Exception as error:  # damaged bytes can make reading fail in any way
                raise CheckpointError(
                    f"{Path(self.path) / name} cannot be read, nothing in it was run: "
                    f"{reason(error)}; use another checkpoint"
                ) from error
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _pieces(self, item: ReadItem) -> Iterator[tuple[MetadataIndex, list[Places]]]:
        """Yield the pieces that a region comes from, and what of each goes where in the region."""
        if item.storage_index.fqn not in self._in_halves:
            region = zip(item.storage_offsets, item.lengths, strict=True)
            yield item.storage_index, [((), tuple(slice(a, a + n) for a, n in region))]
            return
        head_dim, pieces = self._in_halves[item.storage_index.fqn]
        for piece in pieces:
            places = overlap(
                item.storage_offsets,
                item.lengths,
                offsets=piece.offsets,
                sizes=piece.sizes,
                head_dim=head_dim,
            )
            if found := list(places):
                yield MetadataIndex(item.storage_index.fqn, piece.offsets), found

    def _read_file(
        self,
        file: Path,
        parts: Sequence[tuple[ReadItem, MetadataIndex, list[Places]]],
        planner: LoadPlanner,
    ) -> None:
        check_is_file(file)
        with file.open("rb") as stream:
            num_bytes = os.fstat(stream.fileno()).st_size
            for item, index, places in parts:
                place: Place = self.storage_data[index]
                if min(place.offset, place.length) < 0 or place.offset + place.length > num_bytes:
                    raise CheckpointError("it is cut short")
                piece = torch.load(
                    self._slice_file(stream, place), map_location="cpu", weights_only=True
                )
                self._check_stored(piece, index)
                target = planner.resolve_tensor(item).detach()
                for into, out_of in places:
                    target[into].copy_(piece[out_of])
                planner.commit_tensor(item, target)

    def _check_stored(self, piece: Any, index: MetadataIndex) -> None:
        """Refuse a piece of another type or shape than the metadata say: copying would cast it."""
        entry = self._metadata.state_dict_metadata[index.fqn]
        assert isinstance(entry, TensorStorageMetadata)
        pieces = self._in_halves[index.fqn][1] if index.fqn in self._in_halves else entry.chunks
        size = next(piece.sizes for piece in pieces if piece.offsets == index.offset)
        said = f"{METADATA} says {entry.properties.dtype} {list(size)}"
        if not isinstance(piece, Tensor) or piece.layout != torch.strided:
            raise CheckpointError(f"'{index.fqn}' is no plain tensor there; {said}")
        if piece.dtype != entry.properties.dtype or piece.shape != size:
            raise CheckpointError(
                f"'{index.fqn}' is {piece.dtype} {list(piece.shape)} there; {said}"
            )
