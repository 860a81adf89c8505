"""Checkpoints on disk: whole or absent, plain DCP, and refused where they do not fit."""

from __future__ import annotations

import json
import os
import pickle
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.checksums import verify
from torchtitan.checkpoint.state import Component
from torchtitan.checkpoint.storage import find_steps, read_state, write


def components(value: float = 1.0) -> dict[str, Component]:
    weights = {"a.weight": torch.full((64, 64), value), "b": torch.arange(5)}
    return {"model": Component(tensors=weights), "train_state": Component(state={"step": 3})}


def save(target: Path, value: float = 1.0) -> None:
    write(target, components(value), manifest={"step": 3}, group=dist.group.WORLD)


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
