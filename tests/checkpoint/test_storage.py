"""Checkpoints on disk: whole or absent, plain DCP, and refused where they do not fit."""

from __future__ import annotations

import errno
import json
import os
import pickle
import resource
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import read_manifest, verify
from torchtitan.checkpoint.reader import read_tensors
from torchtitan.checkpoint.state import Component
from torchtitan.checkpoint.storage import find_steps, read_state, write


def components(value: float = 1.0) -> dict[str, Component]:
    weights = {"a.weight": torch.full((64, 64), value), "b": torch.arange(5)}
    return {"model": Component(tensors=weights), "train_state": Component(state={"step": 3})}


def save(target: Path, value: float = 1.0) -> None:
    write(target, components(value), manifest={"step": 3}, group=dist.group.WORLD)


def save_and_read(target: Path) -> tuple[dict[str, torch.Tensor], dict[str, int]]:
    save(target)
    into = {"a.weight": torch.zeros(64, 64)}  # a part of it: "b" is left alone
    read_tensors(target, "model", into=into, group=dist.group.WORLD)
    return into, read_state(target, "train_state")


def test_what_was_written_is_read(ranks: RankPool, tmp_path: Path) -> None:
    for tensors, state in ranks.run(save_and_read, tmp_path / "step-3", world=2):
        assert torch.equal(tensors["a.weight"], torch.ones(64, 64))
        assert state == {"step": 3}
    assert find_steps(tmp_path) == [3]
    assert read_manifest(tmp_path / "step-3")["components"] == ["model", "train_state"]
    assert [p.name for p in tmp_path.iterdir()] == ["step-3"]  # no draft is left


def save_without_warnings(target: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        save(target)


def test_a_save_does_what_torch_asks_of_planners(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save_without_warnings, tmp_path / "step-3", world=2)
    assert find_steps(tmp_path) == [3]


@pytest.mark.promise("interchange")
def test_a_component_is_a_plain_dcp_checkpoint(ranks: RankPool, tmp_path: Path) -> None:
    ranks.run(save, tmp_path / "step-3", world=2)
    dcp_to_torch_save(tmp_path / "step-3" / "model", tmp_path / "model.pt")
    weights = torch.load(tmp_path / "model.pt", weights_only=True)
    assert torch.equal(weights["a.weight"], torch.ones(64, 64))


@contextmanager
def file_size_limit(num_bytes: int) -> Iterator[None]:
    """Let no file grow beyond `num_bytes`, as on a full disk: writes raise OSError."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def save_on_a_full_disk(target: Path, full_rank: int) -> str:
    limit = 1024 if dist.get_rank() == full_rank else resource.RLIM_INFINITY
    # two that both ranks hold, too large for one to write both
    weights = {name: torch.full((64, 64), 2.0) for name in ("a.weight", "b.weight")}
    try:
        with file_size_limit(limit):
            parts = {"model": Component(tensors=weights)}
            write(target, parts, manifest={"step": 3}, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return "saved"


@pytest.mark.promise("kill-save")
@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_full_disk_leaves_the_earlier_checkpoint(
    full_rank: int, ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save, tmp_path / "step-3", world=2)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    answers = ranks.run(save_on_a_full_disk, tmp_path / "step-6", full_rank, world=2)
    for message in answers:
        assert naming("step-6", "GiB", f"rank {full_rank}").match(message)
    assert find_steps(tmp_path) == [3]
    after = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}
    assert after == before


def refusal(target: Path) -> str:
    try:
        save(target)
    except CheckpointError as error:
        return str(error)
    return "saved"


def save_much_state_on_a_full_disk(target: Path) -> str:
    large = {**components(), "dataloader": Component(state={"seen": "x" * 100_000})}
    try:
        with file_size_limit(50_000):
            write(target, large, manifest={}, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return "saved"


def test_a_disk_that_is_full_when_all_tensors_are_written(ranks: RankPool, tmp_path: Path) -> None:
    for message in ranks.run(save_much_state_on_a_full_disk, tmp_path / "step-6", world=2):
        assert naming("step-6", os.strerror(errno.EFBIG)).match(message)
    assert list(tmp_path.iterdir()) == []


def save_again_and_fail_to_rename(target: Path) -> str:
    save(target)
    correct = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self.name.endswith(".tmp") and to == target:
            raise OSError("no")
        return correct(self, to)

    Path.rename = failing  # type: ignore[method-assign]
    try:
        return refusal(target)
    finally:
        Path.rename = correct  # type: ignore[method-assign]


@pytest.mark.promise("kill-save")
def test_what_cannot_be_replaced_stays(ranks: RankPool, tmp_path: Path) -> None:
    [message] = ranks.run(save_again_and_fail_to_rename, tmp_path / "step-3", world=1)
    assert "step-3" in message
    assert find_steps(tmp_path) == [3]
    assert verify(tmp_path / "step-3", group=None) == []


def write_uneven_parts(folder: Path) -> list[str]:
    """Save and read a component of which a rank has nothing, and one of which all have nothing."""
    rank = dist.get_rank()
    parts = {
        "model": Component(tensors={"last": torch.ones(3)} if rank == 1 else {}),
        "optimizer": Component(tensors={}),
        "lr_scheduler": Component(state={"warmup": 1}),
    }
    write(folder / "step-3", parts, manifest={"step": 3}, group=dist.group.WORLD)
    into = {"last": torch.zeros(3)} if rank == 1 else {}
    read_tensors(folder / "step-3", "model", into=into, group=dist.group.WORLD)
    assert all(tensor.all() for tensor in into.values())
    read_tensors(folder / "step-3", "optimizer", into={}, group=dist.group.WORLD)
    return sorted(into)


def test_no_tensors_on_a_rank_or_on_any(ranks: RankPool, tmp_path: Path) -> None:
    """As pipeline stages have them, and SGD without momentum."""
    assert ranks.run(write_uneven_parts, tmp_path, world=2) == [[], ["last"]]
    assert verify(tmp_path / "step-3", group=None) == []
    assert sorted(p.name for p in (tmp_path / "step-3" / "lr_scheduler").iterdir()) == [
        "state.json"
    ]


def attempt(target: Path, into: dict[str, torch.Tensor]) -> str:
    try:
        read_tensors(target, "model", into=into, group=dist.group.WORLD)
    except CheckpointError as error:
        return str(error)
    return "read"


@pytest.mark.parametrize(
    ("into", "message"),
    [
        ({"a.weight": torch.zeros(64, 65)}, "'a.weight' has shape [64, 64], not [64, 65]"),
        ({"a.weight": torch.zeros(64, 64).bfloat16()}, "type torch.float32, not torch.bfloat16"),
        ({"c": torch.zeros(1)}, "1 missing: 'c'"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    into: dict[str, torch.Tensor], message: str, ranks: RankPool, tmp_path: Path
) -> None:
    ranks.run(save, tmp_path / "step-3", world=1)
    [answer] = ranks.run(attempt, tmp_path / "step-3", into, world=1)
    assert message in answer


def halve(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def flip_the_end(path: Path) -> None:
    """Change a byte of what torch's format keeps at the end of an entry."""
    content = bytearray(path.read_bytes())
    content[content.rindex(b"PK\x05\x06")] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("name", "harm"),
    [
        ("__0_0.distcp", halve),
        ("__0_0.distcp", flip_the_end),
        ("__0_0.distcp", lambda path: os.truncate(path, 0)),
        ("__0_0.distcp", Path.unlink),
        (".metadata", halve),
        (".metadata", Path.unlink),
    ],
)
def test_damage_is_said_in_one_line_on_all_ranks(
    name: str, harm: Callable[[Path], None], ranks: RankPool, tmp_path: Path
) -> None:
    """Torch adds its stack, its own source lines and advice that would be wrong here."""
    ranks.run(save, tmp_path / "step-3", world=1)
    file = tmp_path / "step-3" / "model" / name
    harm(file)
    into = {"b": torch.zeros(5, dtype=torch.int64), "a.weight": torch.zeros(64, 64)}
    answers = ranks.run(attempt, tmp_path / "step-3", into, world=2)
    for answer in answers:
        assert str(file) in answer
        assert "\n" not in answer


class Command:
    """A pickle of this runs a command."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


@pytest.mark.promise("no-code-from-checkpoints")
@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"position": 8})[:-1].encode(),
        pickle.dumps(Command("touch run")),
        b"[" * 100_000,
        b'["a list"]',
        b'{"position": ' + b"9" * 5000 + b"}",
        b"\xff\xfe",
    ],
    ids=["cut off", "pickle", "nested", "list", "number", "encoding"],
)
def test_a_state_that_is_no_json_object_is_an_error(
    content: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "dataloader").mkdir()
    (tmp_path / "dataloader" / "state.json").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"dataloader/state\.json"):
        read_state(tmp_path, "dataloader")
    assert not Path("run").exists()
