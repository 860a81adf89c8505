"""Read tensors of a DCP folder piece by piece, and execute nothing in it.

DCP plans the pieces of tensors that each rank needs in any layout, and a rank reads only these.
`PieceReader` runs the plan; subclasses open the pieces: `TensorReader` for DCP files,
`hf/weights.py` for Hugging Face files.

DCP's `.metadata` lists name, shape and type of each tensor, and the file of each piece. It is a
pickle, that is, a program that calls functions. `_MetadataUnpickler` replaces each class or
function that DCP's writer names by a `Record`, which stores arguments and state and does nothing;
any other name is refused. Entries of raw bytes, again pickles, are never read.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager
from dataclasses import replace
from io import BufferedReader
from itertools import product
from math import prod
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import _StorageInfo
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
from torch.distributed.checkpoint.utils import _create_file_view
from torch.futures import Future

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.checkpoint.rows import HeadDim, Places, overlap
from torchtitan.checkpoint.storage import METADATA
from torchtitan.mesh.ranks import on_every_rank, on_first_rank, reason, reasons, union

Shape = tuple[int, ...]
SKIP = (
    "use the settings of the checkpoint (model, optimizer, training.dtype), or name parameters or "
    'optimizer state to skip: checkpoint.exclude_from_loading = ["output.*", "optimizer.output.*"]'
)
LARGE = 1 << 20
"""Number of bytes from which a tensor is read without `torch.load`."""


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
        metadata = load_metadata(path.read_bytes())
        _check_places(metadata)
    except CheckpointError as error:
        raise CheckpointError(f"{path} is refused, nothing in it was run: {error}") from error
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise CheckpointError(
            f"{path} cannot be read: {reason(error)}; use another checkpoint"
        ) from error
    return metadata


def _check_places(metadata: Metadata) -> None:
    """Raise CheckpointError for a piece outside its tensor or outside the files of the folder."""
    for name, entry in metadata.state_dict_metadata.items():
        for piece in entry.chunks if isinstance(entry, TensorStorageMetadata) else ():
            sizes = zip(piece.offsets, piece.sizes, entry.size, strict=True)
            if not all(min(at, size) >= 0 and at + size <= total for at, size, total in sizes):
                raise CheckpointError(f"'{name}' has a piece outside of its shape {[*entry.size]}")
            if MetadataIndex(name, piece.offsets) not in metadata.storage_data:
                raise CheckpointError(f"'{name}' has a piece without a file")
    for index, location in metadata.storage_data.items():
        file = location.relative_path
        if os.path.basename(file) != file or file in ("", ".", ".."):
            raise CheckpointError(f"'{index.fqn}' is in {file[:60]!r}, not a file of the folder")
        if location.transform_descriptors:
            raise CheckpointError(f"'{index.fqn}' was transformed when it was saved")


def is_tensor(entry: Any) -> bool:
    """Return whether an entry of the metadata is a tensor, not raw bytes."""
    return isinstance(entry, TensorStorageMetadata)


def find_misses(entry: TensorStorageMetadata) -> str | None:
    """Return why the pieces do not cover a tensor exactly once, None if they do."""
    stored, total = sum(prod(piece.sizes) for piece in entry.chunks), prod(entry.size)
    if stored < total:
        return f"has {stored:,} of {total:,} elements ({stored / total:.1%})"
    return "has pieces that overlap" if stored > total else None


_CLASSES = (
    *(BytesStorageMetadata, ChunkStorageMetadata, Metadata, MetadataIndex, StorageMeta),
    *(TensorProperties, TensorStorageMetadata, _MEM_FORMAT_ENCODING, _StorageInfo, torch.Size),
)
_INERT_NAMES = (
    *((cls.__module__, cls.__qualname__) for cls in _CLASSES),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3 pickle enum members with it
    *product(
        ("pathlib", "pathlib._local"),  # path of the folder when it was saved
        ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    ),
)


class Record:
    """An object that the pickle describes: its arguments and state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # new classes per pickle, because a pickle can set attributes of classes that it names
        self._records = {name: type(name[1], (Record,), {}) for name in _INERT_NAMES}

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or the record class of a name that DCP's writer uses.

        Raises:
            CheckpointError: No checkpoint needs the name.
        """
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in self._records:
            raise CheckpointError(f"it names {module:.60}.{name:.60}, which no checkpoint needs")
        return self._records[module, name]


def load_metadata(data: bytes) -> Metadata:
    """Return the metadata that the pickle `data` describes, without executing anything in it.

    Raises:
        CheckpointError: It is not DCP metadata, or names something no checkpoint needs.
        Exception: Of any type, if the bytes are damaged.
    """
    entries, locations = _fields(
        _MetadataUnpickler(data).load(), Metadata, "state_dict_metadata", "storage_data"
    )
    return Metadata(
        state_dict_metadata={str(name): _build_entry(entry) for name, entry in entries.items()},
        storage_data={
            _build_index(key): _build_place(location) for key, location in locations.items()
        },
    )


def _fields(value: Any, cls: type, *names: str) -> list[Any]:
    """Return fields of the record of an object of class `cls`."""
    if not isinstance(value, Record) or type(value).__name__ != cls.__qualname__:
        raise CheckpointError(f"it has a {type(value).__name__}, not a {cls.__name__}")
    return [value.state[name] for name in names]


def _build_entry(entry: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(entry).__name__ == BytesStorageMetadata.__name__:
        return BytesStorageMetadata()
    properties, size, chunks = _fields(entry, TensorStorageMetadata, "properties", "size", "chunks")
    _fields(properties, TensorProperties)
    dtype = properties.state[0]  # other fields are deprecated, or not needed, like 2.15's strides
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"it has a tensor of type {type(dtype).__name__}")
    pieces = [_fields(chunk, ChunkStorageMetadata, "offsets", "sizes") for chunk in chunks]
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=dtype),
        size=_build_size(size),
        chunks=[ChunkStorageMetadata(*map(_build_size, piece)) for piece in pieces],
    )


def _build_index(key: Any) -> MetadataIndex:
    name, hint = _fields(key, MetadataIndex, "fqn", "index")
    offset = key.state.get("offset")  # only tensors have it
    return MetadataIndex(str(name), None if offset is None else _build_size(offset), hint)


def _build_place(value: Any) -> _StorageInfo:
    path, offset, length = _fields(value, _StorageInfo, "relative_path", "offset", "length")
    transforms = value.state.get("transform_descriptors")
    return _StorageInfo(str(path), int(offset), int(length), transforms)


def _build_size(value: Any) -> torch.Size:
    _fields(value, torch.Size)
    return torch.Size(value.args[0])


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
            for index, locations in self._pieces(item):
                with self.open_piece(index) as piece:
                    for into, out_of in locations:
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
            locations = overlap(
                item.storage_offsets,
                item.lengths,
                offsets=piece.offsets,
                sizes=piece.sizes,
                head_dim=head_dim,
            )
            if matches := list(locations):
                yield MetadataIndex(item.storage_index.fqn, piece.offsets), matches

    def stored_shape(self, index: MetadataIndex) -> torch.Size:
        """Return the shape of a piece."""
        if index.fqn not in self._shapes:
            halved = self._half_split.get(index.fqn)
            pieces = self.entries[index.fqn].chunks if halved is None else halved[1]
            self._shapes[index.fqn] = {piece.offsets: piece.sizes for piece in pieces}
        return self._shapes[index.fqn][index.offset]


class StoredPiece:
    """A tensor that torch.save wrote as `length` bytes at `offset` of a file.

    `torch.load` would read it into new memory, which costs more than reading if it is large. So the
    wanted rows of a large contiguous tensor are read straight into their destination. Other tensors
    are read by `torch.load`.
    """

    def __init__(self, file: BufferedReader, *, offset: int, length: int) -> None:
        self._file = file
        self._begin: int | None = None
        """Offset of the elements in the file; None if `content` has them."""
        self.content: Any = None
        """The loaded object: a tensor, possibly on the meta device, unless the file is damaged."""

        def load(device: str) -> Any:
            view = _create_file_view(file, offset, length)
            return torch.load(view, map_location=device, weights_only=True)

        elements = find_elements(file, offset, length) if length >= LARGE else None
        if elements is not None:
            self.content = load("meta")
        if elements is not None and _is_in_memory_order(self.content, num_bytes=elements[1]):
            self._begin = elements[0]
        else:
            self.content = load("cpu")

    def read(self, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of the tensor into `into`, converted to its type."""
        part: Tensor = self.content[region]
        if self._begin is None:
            into.copy_(part)
            return
        # the elements from the first to the last of the region
        steps = zip(part.shape, part.stride(), strict=True)
        num_elements = 1 + sum((n - 1) * stride for n, stride in steps) if part.numel() else 0
        is_direct = (
            type(into) is Tensor
            and (into.device.type, into.dtype) == ("cpu", part.dtype)
            and into.is_contiguous()
            and part.is_contiguous()
        )
        span = (
            into.as_strided((num_elements,), (1,))
            if is_direct
            else torch.empty(num_elements, dtype=part.dtype)
        )
        self._file.seek(self._begin + part.storage_offset() * part.element_size())
        elements = memoryview(span.view(torch.uint8).numpy())
        if self._file.readinto(elements) < len(elements):
            raise CheckpointError("it is cut short")
        if not is_direct:
            into.copy_(span.as_strided(part.shape, part.stride()))


def find_elements(file: BufferedReader, offset: int, length: int) -> tuple[int, int] | None:
    """Return offset in `file` and size of the only storage in an archive of torch.save.

    None if the archive needs `torch.load`: several storages, another byte order, an old format.
    Written for the private `PyTorchFileReader` of torch 2.11 to 2.15.

    Raises:
        CheckpointError: The elements are compressed, which torch.save never does.
    """
    file.seek(offset)
    if file.read(4) != b"PK\3\4":
        return None
    archive = torch._C.PyTorchFileReader(_create_file_view(file, offset, length))
    storages = [name for name in archive.get_all_records() if name.startswith("data/")]
    has_order = archive.has_record("byteorder")
    if storages != ["data/0"] or not has_order:
        return None
    if archive.get_record("byteorder") != sys.byteorder.encode():
        return None
    file.seek(offset + archive.get_record_header_offset("data/0"))
    header = file.read(10)
    if header[:4] != b"PK\3\4" or header[8:] != b"\0\0":  # the compression method
        raise CheckpointError("its archive is damaged or compressed, which torch.save never does")
    begin, num_bytes = archive.get_record_offset("data/0"), archive.get_record_size("data/0")
    return offset + int(begin), int(num_bytes)


def _is_in_memory_order(content: Any, *, num_bytes: int) -> bool:
    return (
        type(content) is Tensor
        and content.layout == torch.strided
        and content.is_contiguous()
        and not (content.storage_offset() or content.is_conj() or content.is_neg())
        and content.nbytes == num_bytes
    )


class TensorReader(PieceReader):
    """Reader of the tensors in a DCP folder. Other entries are refused."""

    def __init__(self, folder: Path, metadata: Metadata | None = None) -> None:
        """Open a folder; pass `metadata` if another rank has read it."""
        super().__init__(folder, read_metadata(folder) if metadata is None else metadata)
        self._file: tuple[Path, BufferedReader] | None = None

    def check_whole(self, names: Collection[str]) -> None:
        """Raise CheckpointError for a tensor with missing elements: they would not change."""
        tensors = {name: self.entries[name] for name in names if is_tensor(self.entries.get(name))}
        problems = {name: find_misses(entry) for name, entry in tensors.items()}
        wrong = [f"'{name}' {problem}" for name, problem in problems.items() if problem]
        if wrong:
            raise CheckpointError(
                f"{self.path} must have every element of a tensor once: {'; '.join(wrong[:8])}; "
                f"save it from all ranks, or skip these tensors: checkpoint.exclude_from_loading"
            )

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the items of `plan` in the order of the files; each file is opened once."""

        def where(item: ReadItem) -> tuple[str, int]:
            location = self.storage_data.get(item.storage_index)
            return ("", 0) if location is None else (location.relative_path, location.offset)

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
    def open_piece(self, index: MetadataIndex) -> Iterator[StoredPiece]:
        """Open a piece and compare it with the metadata."""
        location: _StorageInfo = self.storage_data[index]
        dtype, shape = self.entries[index.fqn].properties.dtype, self.stored_shape(index)
        file = Path(self.path) / location.relative_path
        try:
            stream = self._open(file)
            if location.offset + location.length > os.fstat(stream.fileno()).st_size:
                raise CheckpointError("it is cut short")
            piece = StoredPiece(stream, offset=location.offset, length=location.length)
            _check_stored(piece.content, index.fqn, dtype=dtype, shape=shape)
            yield piece
        except Exception as error:  # damaged bytes can make reading fail in any way
            raise CheckpointError(
                f"{file} cannot be read, nothing in it was run: {reason(error)}; use another "
                f"checkpoint"
            ) from error

    def copy(self, piece: StoredPiece, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of an open piece."""
        piece.read(region, into=into)


def _check_stored(content: Any, name: str, *, dtype: torch.dtype, shape: torch.Size) -> None:
    """Raise CheckpointError if a piece has another type or shape: copying would convert it."""
    expected = f"{METADATA} lists {dtype} {list(shape)}"
    if not isinstance(content, Tensor) or content.layout != torch.strided:
        raise CheckpointError(f"'{name}' is not a plain tensor; {expected}")
    if content.dtype != dtype or content.shape != shape:
        raise CheckpointError(f"'{name}' is {content.dtype} {list(content.shape)}; {expected}")


def fill(
    into: Mapping[str, Tensor], *, reader: PieceReader, group: dist.ProcessGroup | None
) -> None:
    """Fill tensors in place. Collective over `group`; None for this process only.

    Raises:
        CheckpointError: A file is missing, damaged or refused; the message names the ranks.
    """
    is_local = group is None
    with warnings.catch_warnings():
        if is_local:
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        try:
            dcp.load(dict(into), storage_reader=reader, process_group=group, no_dist=is_local)
        except CheckpointException as error:  # a BaseException
            raise CheckpointError(f"{reader.path}: {reasons(error)}") from error


def stored_shapes(
    checkpoint: Path, component: str, *, group: dist.ProcessGroup | None
) -> dict[str, Shape | None]:
    """Return the shapes of a component's entries by name; None for one that is not a tensor."""

    def shapes() -> dict[str, Shape | None]:
        stored = read_metadata(checkpoint / component).state_dict_metadata
        return {name: _shape_and_dtype(entry)[0] for name, entry in stored.items()}

    return on_first_rank(shapes, group=group)


def read_tensors(
    checkpoint: Path,
    component: str,
    *,
    into: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    may_skip: Callable[[str], bool] = lambda name: True,
    accepts: Collection[str] = (),
    rope_head_dim: HeadDim = lambda name: None,
) -> None:
    """Fill tensors in place from a component that any layout saved.

    Args:
        checkpoint: Folder of the checkpoint.
        component: Name of the component.
        into: Tensors to fill, by name.
        group: Ranks that load together. None: this process only.
        may_skip: Whether a stored tensor that is not in `into` may stay unread.
        accepts: Types to convert, e.g. torch.bfloat16. Other tensors must have the type of `into`.
        rope_head_dim: Head width of a tensor that is stored in the half-split order (`rows.py`),
            None if it has the interleaved order.

    Raises:
        CheckpointError: Names, shapes or types differ, or a file is missing, damaged or refused.
    """
    folder = checkpoint / component
    # names of all ranks: a pipeline stage has only some of the stored tensors
    wanted = union(
        {n: (tuple(t.shape), (str(t.dtype), *accepts)) for n, t in into.items()}, group=group
    )
    with paused_gc():
        metadata = on_first_rank(lambda: read_metadata(folder), group=group)
    readers: list[TensorReader] = []

    def open_component() -> None:
        reader = TensorReader(folder, metadata)
        reader.check_whole(into)
        stored = {name: _shape_and_dtype(entry) for name, entry in reader.entries.items()}
        check_match(folder, stored, wanted, may_skip=may_skip)
        reader.read_half_split_rope({name: rope_head_dim(name) for name in into})
        readers.append(reader)

    on_every_rank(open_component, group=group)
    fill(into, reader=readers[0], group=group)


def _shape_and_dtype(entry: Any) -> tuple[Shape | None, str]:
    if not is_tensor(entry):
        return None, "raw bytes"
    return tuple(entry.size), str(entry.properties.dtype)


def check_match(
    location: Path,
    stored: Mapping[str, tuple[Shape | None, str]],
    wanted: Mapping[str, tuple[Shape, Collection[str]]],
    *,
    may_skip: Callable[[str], bool],
    spell: Callable[[str], str] = repr,
) -> None:
    """Check that stored tensors fit the wanted ones.

    Args:
        location: Folder of the stored tensors, for messages.
        stored: Shape (None for raw bytes) and type by name.
        wanted: Shape and accepted types by name.
        may_skip: Whether a stored tensor that is not wanted may stay unread.
        spell: Formats a name in messages.

    Raises:
        CheckpointError: Tensors are missing or unexpected, or have other shapes or types.
    """
    shapes, types = [], []
    for name in wanted.keys() & stored.keys():
        (shape, accepted), (stored_shape, dtype) = wanted[name], stored[name]
        if stored_shape is None:
            types.append(f"{spell(name)} is raw bytes, which are never loaded")
            continue
        if stored_shape != shape:
            shapes.append(f"{spell(name)} has shape {list(stored_shape)}, not {list(shape)}")
        if dtype not in accepted:
            types.append(f"{spell(name)} has type {dtype}, not {', '.join(accepted)}")
    mistakes = {
        "missing": [spell(n) for n in wanted if n not in stored],
        "unexpected": [spell(n) for n in stored if n not in wanted and not may_skip(n)],
        "of another shape": shapes,
        "of another type": types,
    }
    lines = [
        f"{len(names)} {label}: {'; '.join(sorted(names)[:8])}" + (" ..." if len(names) > 8 else "")
        for label, names in mistakes.items()
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{location} does not fit this job, which reads {len(wanted)} tensors:\n  "
            + "\n  ".join(lines)
            + f"\n{SKIP}"
        )
