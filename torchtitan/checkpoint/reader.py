"""Read tensors of a DCP folder piece by piece, and execute nothing in it.

A tensor is stored in pieces: the shards of the ranks that saved it. A rank reads only the rows of
the pieces that overlap its own shard, so each layout loads what any other layout saved.
`PieceReader` copies regions of pieces; subclasses open them: `TensorReader` in DCP files,
`hf/weights.py` in Hugging Face files.

DCP's `.metadata` lists name, shape and type of each tensor, and the file of each piece. It is a
pickle, that is, a program that calls functions. `_MetadataUnpickler` replaces each class or
function that DCP's writer names by a `Record`, which stores arguments and state and does nothing;
any other name is refused. Entries of raw bytes, again pickles, are never read.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from io import BufferedReader
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import metadata
from torch.distributed.checkpoint.utils import _create_file_view
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.checkpoint.rows import Heads, HeadsOf, overlap
from torchtitan.checkpoint.storage import METADATA, paused_gc
from torchtitan.mesh.ranks import on_every_rank, on_first_rank, reason, union
from torchtitan.models.init import local_part

Shape = tuple[int, ...]
LARGE = 1 << 20
"""Number of bytes from which a tensor is read without `torch.load`."""


class Piece(NamedTuple):
    """A stored block of a tensor."""

    offsets: Shape
    sizes: Shape
    file: str = ""
    position: int = 0
    """Of the first byte in the file."""
    num_bytes: int = 0


@dataclass(frozen=True)
class TensorEntry:
    """A stored tensor."""

    shape: Shape
    dtype: torch.dtype
    pieces: tuple[Piece, ...]


Entries = Mapping[str, TensorEntry | None]
"""The contents of a folder by name; None for raw bytes."""


# -- metadata ------------------------------------------------------------------------------------


class Record:
    """An object that the pickle describes: its arguments and state."""

    def __init__(self, *args: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        self.state = state


_INERT_NAMES = (
    *(("torch.distributed.checkpoint.metadata", name) for name in metadata.__dict__),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # Python 3.11.0 to 3.11.3 pickle enum members with it
    *product(
        ("pathlib", "pathlib._local"),  # path of the folder when it was saved
        ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"),
    ),
)


class _MetadataUnpickler(pickle.Unpickler):
    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        # new classes per pickle, because a pickle can set attributes of classes that it names
        self._records = {name: type(name[1], (Record,), {}) for name in _INERT_NAMES}

    def find_class(self, module: str, name: str) -> Any:
        """Return a dtype, or the record class of a name that DCP's writer uses."""
        dtype = vars(torch).get(name) if module == "torch" else None
        if isinstance(dtype, torch.dtype):
            return dtype
        if (module, name) not in self._records:
            raise CheckpointError(f"it names {module:.60}.{name:.60}, which no checkpoint needs")
        return self._records[module, name]


@paused_gc()
def read_metadata(folder: Path) -> Entries:
    """Return the contents of a DCP folder, without executing anything in it; raise CheckpointError
    if the file is missing or damaged, or names something no checkpoint needs, or a file outside the
    folder."""
    path = folder / METADATA
    try:
        check_is_file(path)
        state = _MetadataUnpickler(path.read_bytes()).load().state
        locations = {
            (str(key.state["fqn"]), _shape(key.state["offset"])): _location(place.state)
            for key, place in state["storage_data"].items()
            if key.state.get("offset") is not None  # raw bytes have none
        }
        entries: dict[str, TensorEntry | None] = {}
        for name, entry in state["state_dict_metadata"].items():
            entries[str(name)] = None
            if type(entry).__name__ != "BytesStorageMetadata":
                pieces = []
                for chunk in entry.state["chunks"]:
                    offsets, sizes = _shape(chunk.state["offsets"]), _shape(chunk.state["sizes"])
                    pieces.append(Piece(offsets, sizes, *locations[str(name), offsets]))
                dtype = entry.state["properties"].state[0]  # the other fields are not needed
                shape = _shape(entry.state["size"])
                entries[str(name)] = TensorEntry(shape, dtype, tuple(pieces))
        return entries
    except Exception as error:  # damaged bytes can make a pickle fail in any way
        raise CheckpointError(
            f"{path} cannot be read, nothing in it was run: {reason(error)}; use another checkpoint"
        ) from error


def _shape(record: Any) -> Shape:
    return tuple(int(size) for size in record.args[0])


def _location(state: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return file, position and number of bytes of a piece."""
    file = str(state["relative_path"])
    if os.path.basename(file) != file or file in ("", ".", ".."):
        raise CheckpointError(f"it lists {file[:60]!r}, which is not a file of the folder")
    if state.get("transform_descriptors"):
        raise CheckpointError("its pieces were transformed when they were saved")
    return file, int(state["offset"]), int(state["length"])


# -- pieces --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Region:
    """A block of a stored tensor, read into `into`."""

    name: str
    into: Tensor
    start: Sequence[int]
    heads: Heads | None = None
    """Heads if the tensor is stored in half-split order (`rows.py`)."""

    def may_overlap(self, pieces: Iterable[Piece]) -> Iterable[Piece]:
        """Return the pieces that have rows of the same heads: few of those of 1,000 ranks."""
        if not self.start:  # a scalar
            return pieces
        unit = self.heads[0] if self.heads else 1
        first = self.start[0] // unit * unit
        last = -(-(self.start[0] + len(self.into)) // unit) * unit
        return [p for p in pieces if p.offsets[0] < last and p.offsets[0] + p.sizes[0] > first]


class PieceReader:
    """Reader of the tensors in `entries`. Subclasses open the pieces."""

    def __init__(self, path: Path, entries: Entries) -> None:
        self.path, self.entries = path, entries

    def open_piece(self, name: str, piece: Piece) -> AbstractContextManager[Any]:
        """Open a piece for `copy`; slices of the result are tensors."""
        raise NotImplementedError

    def copy(self, opened: Any, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of an open piece."""
        into.copy_(opened[region])

    def read(self, regions: Iterable[Region]) -> None:
        """Read regions in the order of the files; raise CheckpointError if elements are not stored,
        or a file is missing, damaged or refused."""
        copies = []
        for region in regions:
            entry, num_stored = self.entries[region.name], 0
            assert entry is not None, f"{region.name} is raw bytes"
            for piece in region.may_overlap(entry.pieces) if region.into.numel() else ():
                areas = list(
                    overlap(
                        region.start,
                        region.into.shape,
                        offsets=piece.offsets,
                        sizes=piece.sizes,
                        heads=region.heads,
                    )
                )
                if areas:
                    copies.append((piece, region, areas))
                    num_stored += sum(region.into[into].numel() for into, _ in areas)
            if num_stored != region.into.numel():
                raise CheckpointError(
                    f"{self.path} must have every element of a tensor once, and has {num_stored:,} "
                    f"of {region.into.numel():,} of '{region.name}'; save it from all ranks, or "
                    f"skip it: checkpoint.exclude_from_loading"
                )
        for piece, region, areas in sorted(copies, key=lambda copy: copy[0][2:]):
            with self.open_piece(region.name, piece) as opened:
                for into, out_of in areas:
                    self.copy(opened, out_of, into=region.into[into])


class StoredPiece:
    """A tensor that torch.save wrote as `num_bytes` at `position` of a file.

    `torch.load` would read it into new memory, which costs more than reading if it is large. So the
    wanted rows of a large contiguous tensor are read straight into their destination. Other tensors
    are read by `torch.load`.
    """

    def __init__(self, file: BufferedReader, *, position: int, num_bytes: int) -> None:
        self._file = file
        self._begin: int | None = None
        """Position of the elements in the file; None if `content` has them."""
        self.content: Any = None
        """The loaded object: a tensor, possibly on the meta device, unless the file is damaged."""

        def load(device: str) -> Any:
            view = _create_file_view(file, position, num_bytes)
            return torch.load(view, map_location=device, weights_only=True)

        elements = find_elements(file, position, num_bytes) if num_bytes >= LARGE else None
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


def find_elements(file: BufferedReader, position: int, num_bytes: int) -> tuple[int, int] | None:
    """Return position in `file` and size of the only storage in an archive of torch.save.

    None if the archive needs `torch.load`: several storages, another byte order, an old format.
    Written for the private `PyTorchFileReader` of torch 2.11 to 2.15. Raises CheckpointError if the
    elements are compressed, which torch.save never does.
    """
    file.seek(position)
    if file.read(4) != b"PK\3\4":
        return None
    archive = torch._C.PyTorchFileReader(_create_file_view(file, position, num_bytes))
    storages = [name for name in archive.get_all_records() if name.startswith("data/")]
    if storages != ["data/0"] or not archive.has_record("byteorder"):
        return None
    if archive.get_record("byteorder") != sys.byteorder.encode():
        return None
    file.seek(position + archive.get_record_header_offset("data/0"))
    header = file.read(10)
    if header[:4] != b"PK\3\4" or header[8:] != b"\0\0":  # the compression method
        raise CheckpointError("its archive is damaged or compressed, which torch.save never does")
    begin, size = archive.get_record_offset("data/0"), archive.get_record_size("data/0")
    return position + int(begin), int(size)


def _is_in_memory_order(content: Any, *, num_bytes: int) -> bool:
    return (
        type(content) is Tensor
        and content.layout == torch.strided
        and content.is_contiguous()
        and not (content.storage_offset() or content.is_conj() or content.is_neg())
        and content.nbytes == num_bytes
    )


class TensorReader(PieceReader):
    """Reader of the tensors in a DCP folder; the file of the last piece stays open."""

    def __init__(self, folder: Path, entries: Entries | None = None) -> None:
        """Open a folder; pass `entries` if another rank has read its metadata."""
        super().__init__(folder, read_metadata(folder) if entries is None else entries)
        self._file: tuple[str, BufferedReader] | None = None

    def close(self) -> None:
        """Close the open file."""
        if self._file is not None:
            self._file[1].close()
        self._file = None

    def read(self, regions: Iterable[Region]) -> None:
        """Read regions; each file is opened once."""
        try:
            super().read(regions)
        finally:
            self.close()

    @contextmanager
    def open_piece(self, name: str, piece: Piece) -> Iterator[StoredPiece]:
        """Open a piece and compare it with the metadata: copying would convert another type."""
        path, entry = self.path / piece.file, self.entries[name]
        assert entry is not None
        try:
            if self._file is None or self._file[0] != piece.file:
                self.close()
                check_is_file(path)
                self._file = piece.file, path.open("rb")
            file = self._file[1]
            if piece.position + piece.num_bytes > os.fstat(file.fileno()).st_size:
                raise CheckpointError("it is cut short")
            stored = StoredPiece(file, position=piece.position, num_bytes=piece.num_bytes)
            content = stored.content
            if not isinstance(content, Tensor) or content.layout != torch.strided:
                raise CheckpointError(f"'{name}' is not a plain tensor")
            if (content.dtype, tuple(content.shape)) != (entry.dtype, piece.sizes):
                raise CheckpointError(
                    f"'{name}' is {content.dtype} {list(content.shape)}, and {METADATA} lists "
                    f"{entry.dtype} {list(piece.sizes)}"
                )
            yield stored
        except Exception as error:  # damaged bytes can make reading fail in any way
            raise CheckpointError(
                f"{path} cannot be read, nothing in it was run: {reason(error)}; use another "
                f"checkpoint"
            ) from error

    def copy(self, opened: StoredPiece, region: tuple[slice, ...], *, into: Tensor) -> None:
        """Copy a region of an open piece."""
        opened.read(region, into=into)


# -- tensors -------------------------------------------------------------------------------------


def fill(
    into: Mapping[str, Tensor],
    *,
    reader: PieceReader,
    group: dist.ProcessGroup | None,
    rope_heads: HeadsOf = lambda name: None,
) -> None:
    """Fill this rank's parts of tensors in place. Collective over `group`.

    `rope_heads` returns the heads of a tensor that is stored in half-split order
    (`rows.py`), None for interleaved order. Raises CheckpointError if a file is missing, damaged or
    refused.
    """

    def regions() -> Iterator[Region]:
        for name, tensor in into.items():
            start: Sequence[int] = [0] * tensor.ndim
            if isinstance(tensor, DTensor):  # as DCP's planner does
                _, start = compute_local_shape_and_global_offset(
                    tensor.shape, tensor.device_mesh, tensor.placements
                )
            yield Region(name, local_part(tensor).detach(), start, rope_heads(name))

    on_every_rank(lambda: reader.read(regions()), group=group)


def stored_shapes(
    checkpoint: Path, component: str, *, group: dist.ProcessGroup | None
) -> dict[str, Shape | None]:
    """Return the shapes of a component's entries by name; None for one that is not a tensor."""

    def shapes() -> dict[str, Shape | None]:
        entries = read_metadata(checkpoint / component)
        return {name: None if entry is None else entry.shape for name, entry in entries.items()}

    return on_first_rank(shapes, group=group)


def read_tensors(
    checkpoint: Path,
    component: str,
    *,
    into: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    may_skip: Callable[[str], bool] = lambda name: True,
    accepts: Collection[str] = (),
    rope_heads: HeadsOf = lambda name: None,
) -> None:
    """Fill tensors in place from a component that any layout saved.

    A stored tensor that is not in `into` stays unread if `may_skip` allows it. Types must be those
    of `into` or one of `accepts`, e.g. torch.bfloat16. `rope_heads`: as in `fill`. Raises
    CheckpointError if names, shapes or types differ, or a file is missing, damaged or refused.
    """
    folder = checkpoint / component
    # names of all ranks: a pipeline stage has only some of the stored tensors
    wanted = union(
        {n: (tuple(t.shape), (str(t.dtype), *accepts)) for n, t in into.items()}, group=group
    )
    with paused_gc():
        entries = on_first_rank(lambda: read_metadata(folder), group=group)
    stored = {
        name: (None, "") if entry is None else (entry.shape, str(entry.dtype))
        for name, entry in entries.items()
    }
    check_match(folder, stored, wanted, may_skip=may_skip)
    reader = TensorReader(folder, entries)
    fill(into, reader=reader, group=group, rope_heads=rope_heads)


def check_match(
    location: Path,
    stored: Mapping[str, tuple[Shape | None, str]],
    wanted: Mapping[str, tuple[Shape, Collection[str]]],
    *,
    may_skip: Callable[[str], bool],
    spell: Callable[[str], str] = repr,
) -> None:
    """Check that stored tensors fit the wanted ones.

    `stored` has shape (None for raw bytes) and type by name, `wanted` shape and accepted types. A
    stored tensor that is not wanted may stay unread if `may_skip` allows it. `spell` formats a name
    in messages. Raises CheckpointError if tensors are missing or unexpected, or have other shapes
    or types.
    """
    others = []
    for name in sorted(wanted.keys() & stored.keys()):
        (shape, types), (stored_shape, dtype) = wanted[name], stored[name]
        if stored_shape is None:
            others.append(f"{spell(name)} is raw bytes, which are never loaded")
        elif stored_shape != shape:
            others.append(f"{spell(name)} has shape {[*stored_shape]}, not {[*shape]}")
        elif dtype not in types:
            others.append(f"{spell(name)} has type {dtype}, not {', '.join(types)}")
    mistakes = {
        "missing": [spell(name) for name in sorted(wanted.keys() - stored.keys())],
        "unexpected": [spell(n) for n in sorted(stored.keys() - wanted.keys()) if not may_skip(n)],
        "of another shape or type": others,
    }
    if any(mistakes.values()):
        lines = [
            f"{len(names)} {label}: {'; '.join(names[:8])}" + (" ..." if names[8:] else "")
            for label, names in mistakes.items()
            if names
        ]
        raise CheckpointError(
            f"{location} does not fit this job, which reads {len(wanted)} tensors:\n  "
            + "\n  ".join(lines)
            + "\nuse the settings of the checkpoint (model, optimizer, training.dtype), or skip "
            "parameters or optimizer state: "
            'checkpoint.exclude_from_loading = ["output.*", "optimizer.output.*"]'
        )
