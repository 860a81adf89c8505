"""DCP's files are read as DCP reads them, and nothing that they name is run."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.reader import Piece, TensorEntry, read_metadata, read_tensors
from torchtitan.checkpoint.state import Component
from torchtitan.checkpoint.storage import write

Kind = _MEM_FORMAT_ENCODING
DTYPES = [
    *("float64", "float32", "bfloat16", "float16", "float8_e4m3fn", "complex64"),
    *("int64", "int32", "int16", "int8", "uint8", "uint16", "bool"),
]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


class Call:
    """Unpickles by calling something: the whole of the danger."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call


def save(target: Path) -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tensors = {name: torch.ones(5, 3, dtype=getattr(torch, name)) for name in DTYPES}
    tensors["sharded"] = distribute_tensor(torch.arange(15.0).view(5, 3), mesh, [Shard(0)])
    tensors["scalar"] = torch.tensor(2.0)
    tensors["a.list.0"] = torch.empty(0)
    tensors[f"of rank {dist.get_rank()}"] = torch.zeros(2)
    write(target, {"model": Component(tensors=tensors)}, manifest={}, group=dist.group.WORLD)


@pytest.mark.promise("interchange")
def test_real_metadata_are_read_as_dcp_reads_them(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, tmp_path / "step-1", world=3)
    ours = read_metadata(tmp_path / "step-1" / "model")
    theirs = dcp.FileSystemReader(tmp_path / "step-1" / "model").read_metadata()
    assert ours.keys() == theirs.state_dict_metadata.keys()
    assert len(ours) == len(DTYPES) + 6
    for name, entry in theirs.state_dict_metadata.items():
        pieces = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks]
        places = [theirs.storage_data[MetadataIndex(name, offsets)] for offsets, _ in pieces]
        assert ours[name] == TensorEntry(
            tuple(entry.size),
            entry.properties.dtype,
            tuple(
                Piece(*piece, place.relative_path, place.offset, place.length)
                for piece, place in zip(pieces, places, strict=True)
            ),
        )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A checkpoint that DCP wrote by itself: `a` of four ones, `b` of two zeros."""
    monkeypatch.chdir(tmp_path)  # an attack that succeeds leaves `run` here
    tensors = {"a": torch.ones(4), "b": torch.zeros(2)}
    dcp.save(tensors, storage_writer=dcp.FileSystemWriter(tmp_path / "model"), no_dist=True)
    return tmp_path / "model"


def read(folder: Path) -> torch.Tensor:
    into = {"a": torch.zeros(4)}
    read_tensors(folder.parent, "model", into=into, group=None)
    return into["a"]


def rewrite(folder: Path, change: Callable[[Metadata], Any]) -> None:
    """Replace `.metadata` by a pickle of what `change` returns, or of what it changed."""
    metadata = dcp.FileSystemReader(folder).read_metadata()
    changed = change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata if changed is None else changed))


@pytest.mark.promise("interchange")
def test_a_checkpoint_of_another_writer_is_read(folder: Path) -> None:
    assert torch.equal(read(folder), torch.ones(4))


def in_an_entry(metadata: Metadata) -> None:
    metadata.state_dict_metadata["z"] = Call(os.system, "touch run")


def in_the_planner_data(metadata: Metadata) -> None:
    metadata.planner_data = Call(eval, "open('run', 'w')")


def in_the_path(metadata: Metadata) -> None:
    metadata.storage_meta.checkpoint_id = Call(exec, "open('run', 'w')")


def by_an_import(metadata: Metadata) -> None:
    metadata.planner_data = Call(getattr, Call(__import__, "os"), "system")


def by_torch(metadata: Metadata) -> None:
    metadata.planner_data = Call(torch.load, "payload.pt")


ATTACKS = {
    "posix.system": in_an_entry,
    "builtins.eval": in_the_planner_data,
    "builtins.exec": in_the_path,
    "builtins.__import__": by_an_import,
    "torch.serialization.load": by_torch,
}


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("name", ATTACKS)
def test_crafted_metadata_are_refused_and_nothing_runs(name: str, folder: Path) -> None:
    Path("payload.pt").write_bytes(pickle.dumps(Call(os.system, "touch run")))
    rewrite(folder, ATTACKS[name])
    with pytest.raises(CheckpointError, match=naming(folder / ".metadata", name)):
        read(folder)
    assert not Path("run").exists()


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("attack", [in_an_entry, in_the_planner_data, in_the_path])
def test_the_attacks_are_real(attack: Callable[[Metadata], None], folder: Path) -> None:
    rewrite(folder, attack)
    dcp.FileSystemReader(folder).read_metadata()
    assert Path("run").exists()


def text(value: str) -> bytes:
    """Push a text."""
    return b"\x8c" + bytes([len(value)]) + value.encode()


def named(module: str, name: str) -> bytes:
    """Push what a module calls by a name."""
    return text(module) + text(name) + b"\x93"


PLACE = "torch.distributed.checkpoint.metadata"
# (None, {"load_id": 1, "exists": 1}), to be set as attributes
STATE = b"N}(" + text("load_id") + b"K\x01" + text("exists") + b"K\x01u\x86"
MEMBER = named(PLACE, "_MEM_FORMAT_ENCODING") + b"K\x00\x85R"
LASTING = {
    "the class of a record": named(PLACE, "StorageMeta") + STATE + b"b",
    "a member of an enumeration": MEMBER + b"}" + text("_value_") + b"K\x07sb",
    "a type": named("torch", "float32") + STATE + b"b",
}


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("what", LASTING)
def test_a_pickle_changes_nothing_that_outlives_it(what: str, folder: Path) -> None:
    """Else later saves of this process could not be read."""
    lasting = [StorageMeta, Metadata, Kind, *Kind]
    before = [dict(vars(one)) for one in lasting]
    (folder / ".metadata").write_bytes(b"\x80\x04" + LASTING[what] + b".")
    try:
        with pytest.raises(CheckpointError, match=r"model/\.metadata"):
            read_metadata(folder)
        assert [dict(vars(one)) for one in lasting] == before
    finally:
        for value, member in enumerate(Kind):
            member._value_ = value


def placed(**fields: Any) -> Callable[[Metadata], None]:
    """Change the location of `a`."""

    def change(metadata: Metadata) -> None:
        vars(metadata.storage_data[MetadataIndex("a", (0,))]).update(fields)

    return change


def chunk(offsets: list[int], sizes: list[int]) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))


def with_pieces(*pieces: tuple[list[int], list[int]]) -> Any:
    """Let `a` be made up of these pieces, all of which lie somewhere."""

    def change(metadata: Metadata) -> None:
        [place] = [p for i, p in metadata.storage_data.items() if i.fqn == "a"]
        entry = metadata.state_dict_metadata["a"]
        entry.chunks = [chunk(*piece) for piece in pieces]
        metadata.storage_data |= {MetadataIndex("a", piece[0]): place for piece in pieces}

    return change


def place_elsewhere(metadata: Metadata) -> None:
    places = metadata.storage_data
    places[MetadataIndex("a", (1,))] = places.pop(MetadataIndex("a", (0,)))


@pytest.mark.parametrize(
    ("change", "values"),
    [
        (with_pieces(([0], [3])), ["'a'", 3, 4]),
        (with_pieces(([0], [3]), ([2], [2])), ["'a'"]),
        (place_elsewhere, [".metadata", "'a'"]),
        *((placed(relative_path=file), [f"'{file}'"]) for file in ("../x", "/etc/x", "..", "x/y")),
        (placed(transform_descriptors=["zip"]), [".metadata"]),
        (lambda metadata: {"a": 1}, [".metadata"]),
    ],
)
def test_a_tensor_is_stored_whole_in_the_folder_or_refused(
    change: Any, values: list[object], folder: Path
) -> None:
    """What no piece covers would keep its initial value, and nobody would see."""
    rewrite(folder, change)
    with pytest.raises(CheckpointError, match=naming(folder, *values)):
        read(folder)


@pytest.mark.parametrize(
    ("there", "values"),
    [
        (torch.ones(4, dtype=torch.float64), [torch.float64, "[4]"]),
        (torch.ones(5), ["torch.float32", "[5]"]),
        ([1.0] * 4, []),
    ],
)
def test_what_a_file_holds_is_what_the_metadata_say(
    there: Any, values: list[object], folder: Path
) -> None:
    """DCP casts in silence."""
    payload = folder / "__0_0.distcp"
    torch.save(there, payload)

    rewrite(folder, placed(offset=0, length=payload.stat().st_size))
    with pytest.raises(CheckpointError, match=naming(payload, "'a'", *values)):
        read(folder)


@pytest.mark.promise("no-code-from-checkpoints")
def test_raw_bytes_are_never_loaded(folder: Path) -> None:
    def make_bytes(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"] = BytesStorageMetadata()

    rewrite(folder, make_bytes)
    (folder / "__0_0.distcp").write_bytes(pickle.dumps(Call(os.system, "touch run")))
    with pytest.raises(CheckpointError, match=naming(folder, "'a'")):
        read(folder)
    assert not Path("run").exists()


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize("protocol", ["zip", "bare pickle"])
def test_a_crafted_payload_is_refused_and_nothing_runs(protocol: str, folder: Path) -> None:
    payload = folder / "__0_0.distcp"
    torch.save(
        Call(os.system, "touch run"), payload, _use_new_zipfile_serialization=protocol == "zip"
    )

    rewrite(folder, placed(offset=0, length=payload.stat().st_size))
    with pytest.raises(CheckpointError, match=naming(payload)) as caught:
        read(folder)
    assert "\n" not in str(caught.value)  # nor torch's advice to load it without weights_only
    assert not Path("run").exists()
    torch.load(payload, weights_only=False)  # the attack is real
    assert Path("run").exists()
