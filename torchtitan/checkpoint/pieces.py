"""Tensors read from disk piece by piece, by DCP's plan.

Common loaders read the whole model on every rank, or on one that sends it around. Here DCP plans
which piece of which tensor a rank needs in any layout, and the rank reads only those, so it never
holds more of a file than one piece of one tensor. What the files are is the business of subclasses:
DCP's own below, those by Hugging Face's names in `hf/read.py`.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from io import BufferedReader
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.base.log import amount
from torchtitan.checkpoint.data_pickle import Place
from torchtitan.checkpoint.metadata import METADATA, find_misses, is_tensor, read_metadata
from torchtitan.checkpoint.ranks import reason, reasons
from torchtitan.checkpoint.rows import Places, overlap
from torchtitan.checkpoint.stored import StoredPiece


class PieceReader(dcp.FileSystemReader):
    """Gives DCP the pieces of the tensors that `metadata` describes; a subclass opens them."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata
        self._in_halves: dict[str, tuple[int, list[ChunkStorageMetadata]]] = {}
        self._shapes: dict[str, dict[torch.Size, torch.Size]] = {}

    def open_piece(self, index: MetadataIndex) -> AbstractContextManager[Any]:
        """Open a piece, for `copy`: slices of the result are tensors."""
        raise NotImplementedError

    def copy(self, piece: Any, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of an open piece."""
        into.copy_(piece[region])

    @property
    def entries(self) -> dict[str, Any]:
        """What is stored, by name."""
        return self._metadata.state_dict_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata, read once."""
        if not isinstance(self._metadata.storage_meta, StorageMeta):
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def grow(self, shapes: Mapping[str, Collection[int]]) -> None:
        """Give tensors the shapes of those to fill: rows behind the stored ones are not read."""
        for name, shape in shapes.items():
            self.entries[name] = replace(self.entries[name], size=torch.Size(shape))

    def turn_halves(self, head_dims: Mapping[str, int | None]) -> None:
        """Read the rows of these tensors as heads in halves, each of so many rows (`rows.py`);
        None: they lie as ours."""
        for name, head_dim in head_dims.items():
            if head_dim is None:
                continue
            entry = self.entries[name]
            assert isinstance(entry, TensorStorageMetadata)
            self._in_halves[name] = head_dim, entry.chunks
            # to DCP one piece: which ones a rank needs follows from the order of rows
            whole = ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)
            self.entries[name] = replace(entry, chunks=[whole])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for.

        Raises:
            CheckpointError: Names the file that is missing, damaged or refused.
        """
        for item in plan.items:
            if item.type == LoadItemType.BYTE_IO:
                raise CheckpointError(f"'{item.storage_index.fqn}' is raw bytes, not a tensor")
            target = planner.resolve_tensor(item).detach()
            for index, places in self._pieces(item):
                with self.open_piece(index) as piece:
                    for into, out_of in places:
                        self.copy(piece, out_of, into=target[into])
            planner.commit_tensor(item, target)
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

    def stored_shape(self, index: MetadataIndex) -> torch.Size:
        """Return the shape of a piece."""
        if index.fqn not in self._shapes:
            halved = self._in_halves.get(index.fqn)
            pieces = self.entries[index.fqn].chunks if halved is None else halved[1]
            self._shapes[index.fqn] = {piece.offsets: piece.sizes for piece in pieces}
        return self._shapes[index.fqn][index.offset]


class TensorReader(PieceReader):
    """Reads tensors, and tensors alone, from a DCP folder."""

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        """`metadata`: what the folder says of its tensors, where another rank has read it."""
        super().__init__(folder, read_metadata(folder) if metadata is None else metadata)
        self._file: tuple[Path, BufferedReader] | None = None

    def check_whole(self, names: Collection[str]) -> None:
        """Refuse tensors of which a part is stored alone: the rest would stay as it is."""
        there = {name: self.entries[name] for name in names if is_tensor(self.entries.get(name))}
        found = {name: find_misses(entry) for name, entry in there.items()}
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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for, each file from front to back, and opened once."""

        def where(item: ReadItem) -> tuple[str, int]:
            place = self.storage_data.get(item.storage_index)
            return ("", 0) if place is None else (place.relative_path, place.offset)

        with closing(self):
            ordered = replace(plan, items=sorted(plan.items, key=where))
            return super().read_data(ordered, planner)

    def close(self) -> None:
        """Close the file that was read last."""
        if self._file is not None:
            self._file[1].close()
        self._file = None

    def _open(self, path: Path) -> BufferedReader:
        """Open a file, unless it is the one that was read last."""
        if self._file is None or self._file[0] != path:
            self.close()
            check_is_file(path)
            self._file = path, path.open("rb")
        return self._file[1]

    @contextmanager
    def open_piece(self, index: MetadataIndex) -> Iterator[StoredPiece]:
        """Open a piece, which has to be what the metadata say."""
        place: Place = self.storage_data[index]
        file = Path(self.path) / place.relative_path
        try:
            stream = self._open(file)
            num_bytes = os.fstat(stream.fileno()).st_size
            if min(place.offset, place.length) < 0 or place.offset + place.length > num_bytes:
                raise CheckpointError("it is cut short")
            piece = StoredPiece(stream, offset=place.offset, length=place.length)
            self._check_stored(piece.content, index)
            yield piece
        except Exception as error:  # damaged bytes can make reading fail in any way
            raise CheckpointError(
                f"{file} cannot be read, nothing in it was run: {reason(error)}; use another "
                f"checkpoint"
            ) from error

    def copy(self, piece: StoredPiece, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of an open piece."""
        piece.read(region, into=into)

    def _check_stored(self, piece: Any, index: MetadataIndex) -> None:
        """Refuse a piece of another type or shape than the metadata say: copying would cast it."""
        dtype, shape = self.entries[index.fqn].properties.dtype, self.stored_shape(index)
        said = f"{METADATA} says {dtype} {list(shape)}"
        if not isinstance(piece, Tensor) or piece.layout != torch.strided:
            raise CheckpointError(f"'{index.fqn}' is no plain tensor there; {said}")
        if piece.dtype != dtype or piece.shape != shape:
            raise CheckpointError(
                f"'{index.fqn}' is {piece.dtype} {list(piece.shape)} there; {said}"
            )


def fill(
    into: Mapping[str, Tensor], *, reader: PieceReader, group: dist.ProcessGroup | None
) -> None:
    """Fill tensors in place, each in its own type; the ranks of `group` together, None: this
    process alone.

    Raises:
        CheckpointError: A file is missing, damaged or refused; says on which ranks.
    """
    alone = group is None
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(into), storage_reader=reader, process_group=group, no_dist=alone)
        except CheckpointException as error:  # no Exception: other ranks would not hear of it
            raise CheckpointError(f"{reader.path}: {reasons(error)}") from error
