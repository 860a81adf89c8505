"""DCP's files are read as DCP reads them, and nothing that they name is run."""

from __future__ import annotations

import os
import pickle
import pickletools
from collections.abc import Callable
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    BytesStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.metadata import read_metadata
from torchtitan.checkpoint.storage import Component, read_tensors, write

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


def test_real_metadata_are_read_as_dcp_reads_them(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, tmp_path / "step-1", world=3)
    ours = read_metadata(tmp_path / "step-1" / "model")
    theirs = dcp.FileSystemReader(tmp_path / "step-1" / "model").read_metadata()
    assert len(ours.state_dict_metadata) == len(DTYPES) + 6
    assert ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
    assert ours.planner_data == theirs.planner_data
    assert ours.version == theirs.version


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


ATTACKS = [in_an_entry, in_the_planner_data, in_the_path, by_an_import, by_torch]


@pytest.mark.parametrize("attack", ATTACKS)
def test_crafted_metadata_are_refused_and_nothing_runs(
    attack: Callable[[Metadata], None], folder: Path
) -> None:
    Path("payload.pt").write_bytes(pickle.dumps(Call(os.system, "touch run")))
    rewrite(folder, attack)
    with pytest.raises(CheckpointError, match=r"model/\.metadata is refused.* it names "):
        read(folder)
    assert not Path("run").exists()


@pytest.mark.parametrize("attack", [in_an_entry, in_the_planner_data, in_the_path])
def test_the_attacks_are_real(attack: Callable[[Metadata], None], folder: Path) -> None:
    rewrite(folder, attack)
    dcp.FileSystemReader(folder).read_metadata()
    assert Path("run").exists()


def test_a_pickle_of_something_else_is_refused(folder: Path) -> None:
    rewrite(folder, lambda metadata: {"a": 1})
    with pytest.raises(CheckpointError, match="it holds a dict, not DCP's metadata"):
        read(folder)


def test_names_within_names_are_refused(folder: Path) -> None:
    evil = b"\x80\x04\x8c\x29torch.distributed.checkpoint.metadata\x8c\x0bMetadata.os\x93."
    evil = evil.replace(b"\x29", bytes([len("torch.distributed.checkpoint.metadata")]))
    pickletools.dis(evil, out=open(os.devnull, "w"))  # noqa: SIM115 - it is a valid pickle
    (folder / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"names torch.*metadata\.Metadata\.os, which no"):
        read(folder)


def test_a_pickle_cannot_change_the_classes(folder: Path) -> None:
    """BUILD on the class itself would set attributes of it for the rest of the process."""
    names = b"torch.distributed.checkpoint.metadata", b"StorageMeta", b"load_id", b"exists"
    module, name, old, new = (b"\x8c" + bytes([len(text)]) + text for text in names)
    # push the class; push (None, {"load_id": 1, "exists": 1}); build; stop
    evil = b"\x80\x04" + module + name + b"\x93N}(" + old + b"K\x01" + new + b"K\x01u\x86b."
    (folder / ".metadata").write_bytes(evil)
    before = dict(vars(StorageMeta))
    with pytest.raises(CheckpointError, match="it tries to change StorageMeta"):
        read(folder)
    assert dict(vars(StorageMeta)) == before


@pytest.mark.parametrize("file", ["../secret", "/etc/hostname", "..", "x/y", 7])
def test_a_file_elsewhere_is_refused(file: Any, folder: Path) -> None:
    def point_elsewhere(metadata: Metadata) -> None:
        metadata.storage_data[MetadataIndex("a", (0,))].relative_path = file

    rewrite(folder, point_elsewhere)
    with pytest.raises(CheckpointError, match=r"'a' lies in .* no file beside it"):
        read(folder)


def test_a_transformed_entry_is_refused(folder: Path) -> None:
    def transform(metadata: Metadata) -> None:
        metadata.storage_data[MetadataIndex("a", (0,))].transform_descriptors = ["zip"]

    rewrite(folder, transform)
    with pytest.raises(CheckpointError, match=r"'a' needs \['zip'\]"):
        read(folder)


def test_raw_bytes_are_never_loaded(folder: Path) -> None:
    def make_bytes(metadata: Metadata) -> None:
        metadata.state_dict_metadata["a"] = BytesStorageMetadata()

    rewrite(folder, make_bytes)
    (folder / "__0_0.distcp").write_bytes(pickle.dumps(Call(os.system, "touch run")))
    with pytest.raises(CheckpointError, match="'a' is raw bytes, which are never loaded"):
        read(folder)
    assert not Path("run").exists()


@pytest.mark.parametrize("protocol", ["zip", "bare pickle"])
def test_a_crafted_payload_is_refused_and_nothing_runs(protocol: str, folder: Path) -> None:
    payload = folder / "__0_0.distcp"
    torch.save(
        Call(os.system, "touch run"), payload, _use_new_zipfile_serialization=protocol == "zip"
    )

    def take_it_whole(metadata: Metadata) -> None:
        place = metadata.storage_data[MetadataIndex("a", (0,))]
        place.offset, place.length = 0, payload.stat().st_size

    rewrite(folder, take_it_whole)
    with pytest.raises(CheckpointError, match=r"cannot be read, nothing .* was run") as caught:
        read(folder)
    assert "__0_0.distcp" in str(caught.value)
    assert "\n" not in str(caught.value)  # nor torch's advice to load it without weights_only
    assert not Path("run").exists()
    torch.load(payload, weights_only=False)  # the attack is real
    assert Path("run").exists()


def test_damaged_metadata_are_named_whatever_pickle_makes_of_them(folder: Path) -> None:
    correct = (folder / ".metadata").read_bytes()
    for length in range(len(correct)):
        (folder / ".metadata").write_bytes(correct[:length])
        with pytest.raises(CheckpointError, match=r"model/\.metadata"):
            read_metadata(folder)


class PicklerOfOtherPython(pickle.Pickler):
    """Python 3.11.0 to 3.11.3 pickle the member of an enumeration as an attribute of it."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, Enum):
            return getattr, (type(value), value.name)
        return NotImplemented


def test_members_of_enumerations_are_read_whatever_python_wrote_them(folder: Path) -> None:
    expected = read_metadata(folder)
    with (folder / ".metadata").open("wb") as file:
        PicklerOfOtherPython(file).dump(expected)
    assert b"getattr" in (folder / ".metadata").read_bytes()
    assert read_metadata(folder) == expected


@pytest.mark.parametrize(
    ("of", "name"), [(Metadata, "__init__"), (Kind, "mro"), (Kind, "__class__")]
)
def test_no_other_attribute_is_handed_out(of: Any, name: str, folder: Path) -> None:
    rewrite(folder, lambda metadata: Call(getattr, of, name))
    with pytest.raises(CheckpointError, match="which no checkpoint needs"):
        read_metadata(folder)
