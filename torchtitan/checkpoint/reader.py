"""Read tensors of a DCP folder piece by piece, and execute nothing in it.

Common loaders read the full model on every rank, or on one rank that sends it to all ranks. Here
DCP plans the pieces of tensors that each rank needs in any layout, and a rank reads only these, so
it never holds more of a file than one piece of one tensor. `PieceReader` runs the plan; subclasses
open the pieces: `TensorReader` those of DCP files, `hf/weights.py` those of Hugging Face files.

DCP's `.metadata` lists name, shape and type of each tensor, and the file of each piece. It is a
pickle, that is, a program: it calls functions and changes objects. Here every class or function
that DCP's writer names becomes a `Record`, which stores its arguments and state and does
nothing; any other name is refused. The metadata is then built from the records field by field, and
checked: pieces must be in the folder, have the listed type and shape, and cover each tensor once.
DCP's entries of raw bytes, again pickles, are never read. `torch.load(weights_only=True)` does not
read this pickle protocol. `pickle.Unpickler` in C, ten times as fast as the one in Python,
allocates its memo for any index, and hashes keys that a few bytes can nest into 2^40 parts. So
`_screen` first refuses all instructions but those of DCP's writer, and lets `persistent_load`
create the dictionaries, whose class checks keys before they are hashed.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import re
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from io import BufferedReader
from itertools import chain, product
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.base.log import plural
from torchtitan.checkpoint.rows import Places, overlap
from torchtitan.checkpoint.storage import METADATA
from torchtitan.checkpoint.stored import LARGE, Place, StoredPiece
from torchtitan.checkpoint.templates import Templates
from torchtitan.mesh.ranks import reason, reasons

_MAX_SPLIT = 6
"""Number of dimensions that pieces may split. Each doubles the number of corners to compare."""


@contextmanager
def paused_gc() -> Iterator[None]:
    """Pause Python's garbage collector, which takes most of the time if objects are many."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@paused_gc()
def read_metadata(folder: Path) -> Metadata:
    """Return the metadata of a DCP folder.

    Raises:
        CheckpointError: The file is missing, damaged, or names something no checkpoint needs.
    """
    path = folder / METADATA
    try:
        check_is_file(path)
        data = path.read_bytes()
        if not data.endswith(pickle.STOP):
            raise EOFError
        metadata = load_metadata(data)
        _check(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused, nothing in it was run: {error}") from error
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise CheckpointError(
            f"{path} cannot be read: {reason(error)}; use another checkpoint"
        ) from error
    return metadata


def _check(metadata: Metadata) -> None:
    """Raise CheckpointError for a piece outside its tensor or outside the files of the folder."""
    for name, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            for piece in entry.chunks:
                _check_piece(name, piece, shape=entry.size)
                if MetadataIndex(name, piece.offsets) not in metadata.storage_data:
                    raise CheckpointError(f"'{name}' has a piece without a file")
    files = {place.relative_path for place in metadata.storage_data.values()}
    outside = {file for file in files if Path(file).name != file or file == ".."}
    for index, place in metadata.storage_data.items():
        if place.relative_path in outside:
            file = place.relative_path
            raise CheckpointError(
                f"'{index.fqn}' is in {file[:60]!r}, which is not a file of the folder"
            )
        if place.transform_descriptors:
            raise CheckpointError(f"'{index.fqn}' was transformed when it was saved")


def _check_piece(name: str, piece: ChunkStorageMetadata, *, shape: torch.Size) -> None:
    fits = len(piece.offsets) == len(piece.sizes) == len(shape) and all(
        min(offset, size) >= 0 and offset + size <= total < 2**63
        for offset, size, total in zip(piece.offsets, piece.sizes, shape, strict=True)
    )
    if not fits:
        raise CheckpointError(
            f"'{name}' has a piece of {list(piece.sizes)} at {list(piece.offsets)}, outside of "
            f"its shape {list(shape)}"
        )


def is_tensor(entry: Any) -> bool:
    """Return whether an entry of the metadata is a tensor, not raw bytes."""
    return isinstance(entry, TensorStorageMetadata)


def find_misses(entry: TensorStorageMetadata) -> str | None:
    """Return why the pieces do not cover a tensor exactly once, None if they do."""
    pieces = [piece for piece in entry.chunks if 0 not in piece.sizes]
    there, total = sum(prod(piece.sizes) for piece in pieces), prod(entry.size)
    if there < total:
        return f"has {there:,} of {total:,} elements ({there / total:.1%})"
    is_one = len(pieces) == 1 and there == total  # pieces are inside their tensor
    return (
        None
        if total == 0 or is_one or _tile(pieces, shape=entry.size)
        else "has pieces that overlap"
    )


def _tile(pieces: list[ChunkStorageMetadata], *, shape: torch.Size) -> bool:
    """Return whether each element is in exactly one of the pieces.

    The mixed differences of a box's indicator function are +1 or -1 at its corners and 0 elsewhere.
    So the pieces tile the shape if and only if their signed corners sum to those of the shape. The
    time is proportional to the number of pieces. Pieces that split more than `_MAX_SPLIT`
    dimensions are treated as overlapping.
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


_MAX_DIMS = 64
_MAX_EQUAL_HASHES = 8
"""Limit of keys with one hash: a dictionary compares each key with all of these."""
_CLASSES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
    *(TensorProperties, TensorStorageMetadata, _MEM_FORMAT_ENCODING, Place, torch.Size),
)
_NAMES = (
    *((cls.__module__, cls.__qualname__) for cls in _CLASSES),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3 pickle enum members with it
    *product(
        ("pathlib", "pathlib._local"),  # path of the folder when it was saved
        ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    ),
)
_BY_SIZE: Mapping[int, tuple[str, ...]] = {
    0: (
        *("STOP", "MARK", "NONE", "NEWTRUE", "NEWFALSE", "EMPTY_TUPLE", "TUPLE1", "TUPLE2"),
        *("TUPLE3", "TUPLE", "EMPTY_LIST", "APPEND", "APPENDS", "SETITEM", "SETITEMS"),
        *("STACK_GLOBAL", "REDUCE", "NEWOBJ", "BUILD", "MEMOIZE"),
    ),
    1: ("PROTO", "BININT1", "BINGET"),
    2: ("BININT2",),
    4: ("BININT", "LONG_BINGET"),
    8: ("BINFLOAT",),
}
"""Instructions of DCP's writer, by the number of bytes that follow. None allocates more than it
reads."""
_SIZED = b"|".join(re.escape(bytes([size])) + b".{%d}" % size for size in range(256))
_RUN = re.compile(
    rb"(?:%s|[%s](?:%s)){0,1000}"  # more would take much memory
    % (
        b"|".join(
            b"[%s].{%d}" % (re.escape(b"".join(getattr(pickle, name) for name in names)), size)
            for size, names in _BY_SIZE.items()
        ),
        re.escape(pickle.SHORT_BINUNICODE + pickle.LONG1),
        _SIZED,
    ),
    re.DOTALL,
)


class Record:
    """An object described by the pickle. Hashed by identity."""

    __slots__ = ("args", "state")

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


_RECORDS = {name: type(name[1], (Record,), {"__slots__": ()}) for name in _NAMES}
_TYPES = {cls: _RECORDS[cls.__module__, cls.__qualname__] for cls in _CLASSES}


class Dictionary(dict[Any, Any]):
    """A dictionary in the pickle. Keys are text or records, whose hashes take no time."""

    def __setitem__(self, key: Any, value: Any) -> None:
        if not isinstance(key, str | Record):
            raise CheckpointError(f"it has a key of type {type(key).__name__}")
        super().__setitem__(key, value)


class _Reader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Return the record type of a name, or a dtype.

        Raises:
            CheckpointError: DCP's writer does not use the name.
        """
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in _RECORDS:
            raise CheckpointError(f"it names {module:.60}.{name:.60}, which no checkpoint needs")
        return _RECORDS[module, name]

    def persistent_load(self, _: Any) -> Any:
        """Return a new dictionary."""
        return Dictionary()


def _screen(data: bytes) -> bytes:
    """Return the pickle without frames, with dictionaries that `persistent_load` makes.

    Raises:
        CheckpointError: It has an instruction that DCP's writer does not use.
    """
    parts, begin = [], 0
    while begin < len(data):
        run = _RUN.match(data, begin)
        assert run is not None
        parts.append(run[0])
        at = run.end()
        code, begin = data[at : at + 1], at + 1
        if code == pickle.EMPTY_DICT:
            parts.append(pickle.EMPTY_TUPLE + pickle.BINPERSID)
        elif code == pickle.FRAME:
            begin += 8
        elif code == pickle.BINUNICODE:
            begin += 4 + int.from_bytes(data[at + 1 : at + 5], "little")
            parts.append(data[at:begin])
        elif run[0]:
            begin = at
        else:
            raise CheckpointError(f"it has the instruction {code[0]}, which no checkpoint needs")
    return b"".join(parts)


def load_metadata(data: bytes) -> Metadata:
    """Return the metadata that the pickle `data` describes, without executing anything in it.

    Raises:
        CheckpointError: It is not DCP metadata, or names something no checkpoint needs.
        Exception: Of any type, if the bytes are damaged.
    """
    root = _Reader(io.BytesIO(_screen(data))).load()
    tensors, storage = _fields(root, Metadata, "state_dict_metadata", "storage_data")
    # entries may share a list: count before building pieces
    chunks = [
        _fields(e, TensorStorageMetadata, "chunks") for e in tensors.values() if not _is_raw(e)
    ]
    if sum(len(pieces) for [pieces] in chunks) > len(storage):
        raise CheckpointError("its tensors have more pieces than files hold")
    indices = [_index(key) for key in storage]
    if max(Counter(map(hash, indices)).values(), default=0) > _MAX_EQUAL_HASHES:
        raise CheckpointError(f"more than {_MAX_EQUAL_HASHES} of its keys have the same hash")
    return Metadata(
        state_dict_metadata={name: _entry(entry) for name, entry in tensors.items()},
        storage_data=dict(zip(indices, map(_place, storage.values()), strict=True)),
    )


def _fields(value: Any, cls: type, *names: str) -> list[Any]:
    """Return fields of a record of class `cls`."""
    _check_type(value, cls)
    return [value.state[name] for name in names]


def _check_type(value: Any, cls: type) -> None:
    if type(value) is not _TYPES[cls]:
        raise CheckpointError(f"it has a {type(value).__name__}, not a {cls.__name__}")


def _is_raw(entry: Any) -> bool:
    return type(entry) is _TYPES[BytesStorageMetadata]


def _entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if _is_raw(entry):
        return BytesStorageMetadata()
    properties, size, chunks = _fields(entry, TensorStorageMetadata, "properties", "size", "chunks")
    _check_type(properties, TensorProperties)
    dtype = properties.state[0]  # other fields are deprecated, or not needed, like 2.15's strides
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"it has a tensor of type {type(dtype).__name__}")
    pieces = [_fields(chunk, ChunkStorageMetadata, "offsets", "sizes") for chunk in chunks]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_size(size),
        chunks=[ChunkStorageMetadata(_size(at), _size(sizes)) for at, sizes in pieces],
    )


def _index(key: Any) -> MetadataIndex:
    name, hint = _fields(key, MetadataIndex, "fqn", "index")
    offset = key.state.get("offset")  # only tensors have it
    if type(name) is not str or type(hint) not in (int, type(None)):
        raise CheckpointError("it has an index that is not a name and a number")
    return MetadataIndex(name, None if offset is None else _size(offset), hint)


def _place(value: Any) -> Place:
    path, offset, length = _fields(value, Place, "relative_path", "offset", "length")
    if not (type(path) is str and type(offset) is type(length) is int):
        raise CheckpointError("it has a location that is not a file name and two numbers")
    return Place(path, offset, length, value.state.get("transform_descriptors"))


def _size(value: Any) -> torch.Size:
    _check_type(value, torch.Size)
    (dims,) = value.args
    if type(dims) is not tuple or len(dims) > _MAX_DIMS or not all(type(n) is int for n in dims):
        raise CheckpointError(f"it has a size that is not up to {_MAX_DIMS} integers")
    return torch.Size(dims)


class PieceReader(dcp.FileSystemReader):
    """Storage reader of DCP for the tensors in `metadata`. Subclasses open the pieces."""

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(path)
        self._metadata = metadata
        self._half_split: dict[str, tuple[int, list[ChunkStorageMetadata]]] = {}
        self._shapes: dict[str, dict[torch.Size, torch.Size]] = {}

    def open_piece(self, index: MetadataIndex) -> AbstractContextManager[Any]:
        """Open a piece for `copy`; slices of the result are tensors."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the files that are open."""

    def copy(self, piece: Any, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of an open piece."""
        into.copy_(piece[region])

    @property
    def entries(self) -> dict[str, Any]:
        """Metadata of tensors and other entries by name."""
        return self._metadata.state_dict_metadata

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata."""
        if not isinstance(self._metadata.storage_meta, StorageMeta):
            self._metadata.storage_meta = StorageMeta()
        self._metadata.storage_meta.load_id = self.load_id
        return self._metadata

    def grow(self, shapes: Mapping[str, Collection[int]]) -> None:
        """Set larger shapes for tensors with fewer stored rows; the missing rows are not read."""
        for name, shape in shapes.items():
            self.entries[name] = replace(self.entries[name], size=torch.Size(shape))

    def read_half_split_rope(self, head_dims: Mapping[str, int | None]) -> None:
        """Convert tensors from half-split to interleaved row order (`rows.py`).

        `head_dims` has the rows per head of each tensor, None if its order is interleaved.
        """
        for name, head_dim in head_dims.items():
            if head_dim is None:
                continue
            entry = self.entries[name]
            assert isinstance(entry, TensorStorageMetadata)
            self._half_split[name] = head_dim, entry.chunks
            # one piece for DCP: the stored pieces that a rank needs depend on the row order
            whole = ChunkStorageMetadata(torch.Size([0] * len(entry.size)), entry.size)
            self.entries[name] = replace(entry, chunks=[whole])

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan`.

        Raises:
            CheckpointError: A file is missing, damaged or refused.
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
        """Yield the stored pieces of a region with the copies from each."""
        if item.storage_index.fqn not in self._half_split:
            region = zip(item.storage_offsets, item.lengths, strict=True)
            yield item.storage_index, [((), tuple(slice(a, a + n) for a, n in region))]
            return
        head_dim, pieces = self._half_split[item.storage_index.fqn]
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
            halved = self._half_split.get(index.fqn)
            pieces = self.entries[index.fqn].chunks if halved is None else halved[1]
            self._shapes[index.fqn] = {piece.offsets: piece.sizes for piece in pieces}
        return self._shapes[index.fqn][index.offset]


class TensorReader(PieceReader):
    """Reader of the tensors in a DCP folder. Other entries are refused."""

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        """Open a folder; pass `metadata` if another rank has read it."""
        super().__init__(folder, read_metadata(folder) if metadata is None else metadata)
        self._file: tuple[Path, BufferedReader] | None = None
        self._templates = Templates()

    def check_whole(self, names: Collection[str]) -> None:
        """Raise CheckpointError for a tensor with missing elements: they would not change."""
        there = {name: self.entries[name] for name in names if is_tensor(self.entries.get(name))}
        found = {name: find_misses(entry) for name, entry in there.items()}
        wrong = sorted(f"'{name}' {what}" for name, what in found.items() if what is not None)
        if wrong:
            raise CheckpointError(
                f"{self.path} must have every element of a tensor once, "
                f"{plural(len(wrong), 'tensor')} differ:\n  "
                + "; ".join(wrong[:8])
                + (" ..." if len(wrong) > 8 else "")
                + "\nlikely only one of several ranks saved its part (dcp.save with no_dist, or "
                "not called on all ranks); save it again from all ranks, or skip these tensors: "
                "checkpoint.exclude_from_loading"
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan` in the order of the files; each file is opened once."""

        def where(item: ReadItem) -> tuple[str, int]:
            place = self.storage_data.get(item.storage_index)
            return ("", 0) if place is None else (place.relative_path, place.offset)

        with closing(self):
            ordered = replace(plan, items=sorted(plan.items, key=where))
            return super().read_data(ordered, planner)

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file[1].close()
        self._file = None

    def _open(self, path: Path) -> BufferedReader:
        """Open a file unless it is open."""
        if self._file is None or self._file[0] != path:
            self.close()
            check_is_file(path)
            self._file = path, path.open("rb")
        return self._file[1]

    @contextmanager
    def open_piece(self, index: MetadataIndex) -> Iterator[StoredPiece | Tensor]:
        """Open a piece and compare it with the metadata; a small one is read."""
        place: Place = self.storage_data[index]
        dtype, shape = self.entries[index.fqn].properties.dtype, self.stored_shape(index)
        file = Path(self.path) / place.relative_path
        try:
            stream = self._open(file)
            num_bytes = os.fstat(stream.fileno()).st_size
            begin, end = place.offset, place.offset + place.length
            if min(begin, place.length) < 0 or end > num_bytes:
                raise CheckpointError("it is cut short")
            piece: Any
            if place.length < LARGE:
                piece = self._templates.load(stream, slice(begin, end), dtype=dtype, shape=shape)
                content = piece
            else:
                piece = StoredPiece(stream, offset=begin, length=place.length)
                content = piece.content
            _check_stored(content, index.fqn, dtype=dtype, shape=shape)
            yield piece
        except Exception as error:  # damaged bytes can make reading fail in any way
            raise CheckpointError(
                f"{file} cannot be read, nothing in it was run: {reason(error)}; use another "
                f"checkpoint"
            ) from error

    def copy(self, piece: StoredPiece | Tensor, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of an open piece."""
        if isinstance(piece, StoredPiece):
            piece.read(region, into=into)
        else:
            super().copy(piece, region, into=into)


def _check_stored(content: Any, name: str, *, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raise CheckpointError if a piece has another type or shape: copying would convert it."""
    listed = f"{METADATA} lists {dtype} {list(shape)}"
    if not isinstance(content, Tensor) or content.layout != torch.strided:
        raise CheckpointError(f"'{name}' is not a plain tensor; {listed}")
    if content.dtype != dtype or content.shape != shape:
        raise CheckpointError(f"'{name}' is {content.dtype} {list(content.shape)}; {listed}")


def fill(
    into: Mapping[str, Tensor], *, reader: PieceReader, group: dist.ProcessGroup | None
) -> None:
    """Fill tensors in place. Collective over `group`; None for this process only.

    Raises:
        CheckpointError: A file is missing, damaged or refused; the message names the ranks.
    """
    alone = group is None
    with warnings.catch_warnings():
        if alone:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(into), storage_reader=reader, process_group=group, no_dist=alone)
        except CheckpointException as error:  # a BaseException
            raise CheckpointError(f"{reader.path}: {reasons(error)}") from error
