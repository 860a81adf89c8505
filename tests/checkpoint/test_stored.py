"""Large tensors are read as torch.load reads them, without the memory that it takes.

The oracle is torch.load itself, of the same bytes.
"""

from __future__ import annotations

import io
import sys
import zipfile
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from tests.distributed.rank_pool import RankPool
from torchtitan.checkpoint.reader import LARGE, StoredPiece, read_tensors
from torchtitan.checkpoint.state import Component
from torchtitan.checkpoint.storage import write

BEFORE, BEHIND = b"another piece", b"and one more"


def large(dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor whose elements differ, as far as their type can tell."""
    return (torch.arange(LARGE // dtype.itemsize) % 251).to(dtype).view(2, -1, 64)


def saved(value: Any, **options: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(value, stream, **options)
    return stream.getvalue()


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[bytes], StoredPiece]:
    """Put bytes in the middle of a file, as DCP does, and open them."""

    def open_piece(content: bytes) -> StoredPiece:
        (tmp_path / "file").write_bytes(BEFORE + content + BEHIND)
        file = (tmp_path / "file").open("rb")
        return StoredPiece(file, position=len(BEFORE), num_bytes=len(content))

    return open_piece


@pytest.fixture
def places(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Where torch.load was told to put tensors."""
    told: list[str] = []
    correct = torch.load

    def load(*args: Any, **options: Any) -> Any:
        told.append(options["map_location"])
        return correct(*args, **options)

    monkeypatch.setattr(torch, "load", load)
    return told


def bits(tensor: Tensor) -> Tensor:
    """Return what compares equal whatever the numbers mean."""
    return tensor.resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


EVERYTHING = (slice(None), slice(None), slice(None))
ROWS = (slice(1, 2), slice(3, 70), slice(None))
COLUMNS = (slice(None), slice(5, None), slice(7, 9))


@pytest.mark.parametrize("region", [EVERYTHING, ROWS, COLUMNS], ids=["all", "rows", "columns"])
@pytest.mark.parametrize("name", ["float64", "bfloat16", "complex64", "uint16", "bool"])
def test_any_region_of_any_type_is_read(
    name: str, region: Any, opened: Callable[[bytes], StoredPiece], places: list[str]
) -> None:
    expected = large(getattr(torch, name))
    into = torch.zeros_like(expected[region], memory_format=torch.contiguous_format)
    opened(saved(expected)).read(region, into=into)
    assert torch.equal(bits(into), bits(expected[region]))
    assert places == ["meta"]


def zipped_anew(
    content: bytes, *, order: str | None = sys.byteorder, method: int = zipfile.ZIP_STORED
) -> bytes:
    """Return an archive as another writer may write it: compressed, or of another machine."""
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(stream, "w") as new:
        for record in old.infolist():
            data, name = old.read(record), record.filename
            if "/data/" in name and order == OTHER:
                numbers = array("I", data)
                numbers.byteswap()
                data = numbers.tobytes()
            if name.endswith("/byteorder"):
                data = (order or "").encode()
            if data:
                new.writestr(name, data, method if "/data/" in name else zipfile.ZIP_STORED)
        new.writestr("archive/.more", bytes(LARGE))  # a wrong size does not end behind the file
    return stream.getvalue()


OTHER = "big" if sys.byteorder == "little" else "little"
NOISE = torch.rand(2, 256, 512, generator=torch.Generator().manual_seed(0))  # compresses to no less
OTHERWISE = {
    "transposed": (saved(large().transpose(0, 2)), large().transpose(0, 2)),
    "part of a storage": (saved(large()[1:]), large()[1:]),
    "conjugated": (saved(large(torch.complex64).conj()), large(torch.complex64).conj()),
    "negated": (saved(torch._neg_view(large())), -large()),
    "a bare pickle": (saved(large(), _use_new_zipfile_serialization=False), large()),
    "another byte order": (zipped_anew(saved(NOISE), order=OTHER), NOISE),
    "an unknown byte order": (zipped_anew(saved(NOISE), order=None), NOISE),  # as before torch 2.1
    "a parameter": (saved(torch.nn.Parameter(NOISE)), NOISE),
    "small": (saved(NOISE[0, 0].clone()), NOISE[0, 0]),
}


@pytest.mark.parametrize("which", OTHERWISE)
def test_what_lies_otherwise_is_read_by_torch(
    which: str, opened: Callable[[bytes], StoredPiece], places: list[str]
) -> None:
    content, expected = OTHERWISE[which]
    into = torch.zeros_like(expected, memory_format=torch.contiguous_format)
    opened(content).read((slice(None),), into=into)
    assert torch.equal(bits(into), bits(expected))
    assert places[-1] == "cpu"


def outcome(read: Callable[[bytes], Tensor], content: bytes) -> bytes | None:
    """Return type, shape and elements of what is read; None: it is refused."""
    try:
        tensor = read(content)
    except Exception:  # noqa: BLE001 - damaged bytes make reading fail in any way
        return None
    return str((tensor.dtype, tensor.shape)).encode() + bits(tensor).numpy().tobytes()


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
def test_damage_is_refused_or_read_as_torch_reads_it(
    opened: Callable[[bytes], StoredPiece],
) -> None:
    """Of any byte around the elements: in a folder of another writer no checksum guards them."""

    def ours(content: bytes) -> Tensor:
        piece = opened(content)
        into = torch.empty(piece.content.shape, dtype=piece.content.dtype)
        piece.read((), into=into)
        return into

    def theirs(content: bytes) -> Tensor:
        tensor: Tensor = torch.load(io.BytesIO(content), weights_only=True)
        return tensor

    whole = zipped_anew(saved(large()))
    correct = outcome(theirs, whole)
    assert outcome(ours, whole) == correct is not None
    begin = whole.index(bits(large()).numpy().tobytes())
    directory = whole.index(b"PK\1\2")
    around = [
        *range(begin),
        *range(begin + large().nbytes, begin + large().nbytes + 60),
        *range(directory, len(whole)),
    ]
    num_refused = 0
    for offset in around:
        damaged = bytearray(whole)
        damaged[offset] ^= 1 << offset % 8
        found = outcome(ours, bytes(damaged))
        if found not in (None, correct):
            assert found == outcome(theirs, bytes(damaged)), offset
        num_refused += found is None
    assert 0 < num_refused < len(around)


WHOLE = torch.arange(1024 * 1024.0).view(1024, 1024)


def laid(placement: Placement) -> DTensor:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return distribute_tensor(WHOLE.clone(), mesh, [placement])


def save_as(folder: Path, placement: Placement) -> None:
    component = Component(tensors={"a": laid(placement)})
    write(folder / "step-1", {"model": component}, manifest={}, group=dist.group.WORLD)


def read_as(folder: Path, placement: Placement) -> bool:
    into = laid(placement)
    expected = into.to_local().clone()
    into.to_local().zero_()
    read_tensors(folder / "step-1", "model", into={"a": into}, group=dist.group.WORLD)
    return torch.equal(into.to_local(), expected)


@pytest.mark.parametrize("before", [Shard(0), Shard(1)])
def test_large_pieces_go_into_any_layout(
    before: Placement, ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save_as, tmp_path, before, world=2)
    for after in (Shard(0), Shard(1), Replicate()):
        assert ranks.run(read_as, tmp_path, after, world=3) == [True] * 3
