"""No byte of a checkpoint can change without being found, and the newest whole one is found."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import xxhash

from tests.distributed.rank_pool import RankPool
from torchtitan.checkpoint.checksums import (
    hash_file,
    read_manifest,
    seal,
    verify,
    write_bytes,
)
from torchtitan.checkpoint.start import newest_valid_step
from torchtitan.checkpoint.state import Component
from torchtitan.checkpoint.storage import find_steps, write

FILES = [
    "manifest.json",
    "model/.metadata",
    "model/__0_0.distcp",
    "model/__1_0.distcp",
    "train_state/state.json",
]


def save(target: Path) -> None:
    """Save from every rank a tensor of its own, so that each writes a file."""
    rank = dist.get_rank()
    components = {
        "model": Component(tensors={f"rank_{rank}": torch.full((8,), rank), "b": torch.ones(3)}),
        "train_state": Component(state={"step": 3}),
    }
    write(target, components, manifest={"step": 3}, group=dist.group.WORLD)


@pytest.fixture(scope="module")
def saved(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("verify")
    ranks.run(save, folder / "step-3", world=2)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to do harm to, with steps 3, 6 and 9."""
    for step in (3, 6, 9):
        shutil.copytree(saved / "step-3", tmp_path / f"step-{step}")
    return tmp_path


def verify_and_find(folder: Path) -> tuple[list[str], Path | None]:
    found = newest_valid_step(folder, group=dist.group.WORLD, verifies=True)
    return verify(folder / "step-9", group=dist.group.WORLD), found


@pytest.mark.promise("flipped-byte")
def test_a_whole_one_is_whole_and_its_digests_are_those_of_its_files(saved: Path) -> None:
    step = saved / "step-3"
    present = sorted(p.relative_to(step).as_posix() for p in step.rglob("*") if p.is_file())
    assert present == FILES
    assert verify(step, group=None) == []
    for name, entry in read_manifest(step)["files"].items():
        content = (step / name).read_bytes()
        digest = xxhash.xxh3_128_hexdigest(content)
        assert entry == {"size": len(content), "xxh3_128": digest}


@pytest.mark.promise("flipped-byte")
@pytest.mark.parametrize("name", FILES)
def test_any_flipped_byte_of_any_file_is_found(name: str, folder: Path) -> None:
    path = folder / "step-3" / name
    correct = path.read_bytes()
    with path.open("r+b") as file:
        for offset in range(0, len(correct), 1 + len(correct) // 150):  # all of a short one
            byte = correct[offset]
            os.pwrite(file.fileno(), bytes([byte ^ 1 << offset % 8]), offset)
            [mistake] = verify(folder / "step-3", group=None)
            assert name in mistake, offset
            os.pwrite(file.fileno(), bytes([byte]), offset)
    assert verify(folder / "step-3", group=None) == []


@pytest.mark.promise("flipped-byte")
def test_a_file_of_several_chunks_is_hashed_to_its_end(tmp_path: Path) -> None:
    content = random.Random(0).randbytes((5 << 20) // 2)
    (tmp_path / "file").write_bytes(content)
    assert hash_file(tmp_path / "file") == xxhash.xxh3_128_hexdigest(content)


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def grow(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"\0")


def remove(path: Path) -> None:
    path.unlink()


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 16
    path.write_bytes(content)


@pytest.mark.promise("flipped-byte")
@pytest.mark.parametrize("harm", [cut, grow, remove, flip])
@pytest.mark.parametrize("name", ["manifest.json", "model/__1_0.distcp"])
def test_all_ranks_name_what_is_wrong_and_take_the_newest_whole_step(
    harm: Callable[[Path], None], name: str, folder: Path, ranks: RankPool
) -> None:
    harm(folder / "step-9" / name)
    harm(folder / "step-6" / name)
    for [mistake], newest in ranks.run(verify_and_find, folder, world=2):
        assert name in mistake
        assert newest == folder / "step-3"


@pytest.mark.promise("kill-save")
def test_a_complete_draft_gets_the_name_that_a_kill_kept_from_it(folder: Path) -> None:
    """Killed while replacing step 9: the old one is put aside, the new one not yet named."""
    (folder / "step-9").rename(folder / ".step-9.deleted")
    (folder / "step-6").rename(folder / ".step-9.tmp")
    assert newest_valid_step(folder, group=None, verifies=True, recovers=True) == folder / "step-9"
    assert sorted(p.name for p in folder.iterdir()) == ["step-3", "step-9"]


@pytest.mark.promise("kill-save")
def test_the_drafts_of_another_run_are_left_to_it(folder: Path) -> None:
    """It may be alive, right between the manifest and the rename."""
    (folder / "step-9").rename(folder / ".step-9.tmp")
    assert newest_valid_step(folder, group=None, verifies=True) == folder / "step-6"
    assert sorted(p.name for p in folder.iterdir()) == [".step-9.tmp", "step-3", "step-6"]


@pytest.mark.promise("kill-save")
@pytest.mark.parametrize("harm", [cut, remove])
def test_a_draft_that_is_not_complete_stays_one(harm: Callable[[Path], None], folder: Path) -> None:
    (folder / "step-9").rename(folder / ".step-9.tmp")
    harm(folder / ".step-9.tmp" / "manifest.json")
    assert newest_valid_step(folder, group=None, verifies=True, recovers=True) == folder / "step-6"
    assert find_steps(folder) == [3, 6]


def save_at(folder: Path) -> None:
    save(folder / "step-12")


@pytest.mark.promise("kill-save")
def test_a_save_clears_what_dead_ones_left(folder: Path, ranks: RankPool) -> None:
    (folder / "step-6").rename(folder / ".step-6.deleted")
    (folder / "step-9").rename(folder / ".step-9.tmp")
    remove(folder / ".step-9.tmp" / "manifest.json")
    (folder / ".mine").mkdir()
    ranks.run(save_at, folder, world=1)
    assert sorted(p.name for p in folder.iterdir()) == [".mine", "step-12", "step-3"]


def resealed(manifest: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(manifest.read_text())
    del content["checksum"]
    change(content)
    write_bytes(manifest, seal(content))


ENTRY = {"size": 5, "xxh3_128": "0" * 32}
CRAFTED: dict[str, Callable[[dict[str, Any]], object]] = {
    "no checksum": lambda m: m["files"].update({"a": {"size": 5}}),
    "an entry that is a list": lambda m: m["files"].update({"a": [5, "0"]}),
    "a list of files": lambda m: m.update(files=[ENTRY]),
    "no files": lambda m: m.pop("files"),
    **{
        f"a file {name!r}": partial(lambda m, name: m["files"].update({name: ENTRY}), name=name)
        for name in ("/etc/hostname", "../a", "a/.", "", "a\0b", "a\ud800")
    },
}


@pytest.mark.parametrize("which", CRAFTED)
def test_a_crafted_manifest_is_passed_over_for_the_step_before(which: str, folder: Path) -> None:
    """Its seal is whole: who writes a manifest can seal it."""
    resealed(folder / "step-9" / "manifest.json", CRAFTED[which])
    [mistake] = verify(folder / "step-9", group=None)
    assert "manifest.json" in mistake
    assert newest_valid_step(folder, group=None, verifies=True) == folder / "step-6"


@pytest.mark.parametrize("name", ["step-.", "step-+5", "step-٣", "step-09", f"step-{'9' * 200}"])
def test_a_folder_or_draft_of_another_name_is_no_step(name: str, folder: Path) -> None:
    draft = (folder / "step-9").rename(folder / f".{name}.tmp")
    assert newest_valid_step(folder, group=None, verifies=True, recovers=True) == folder / "step-6"
    draft.rename(folder / name)
    assert find_steps(folder) == [3, 6]
