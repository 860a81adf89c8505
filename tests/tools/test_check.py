"""Each fault that is planted on one rank is found there, and nothing where there is none."""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.jobs import write_job
from tests.distributed.rank_pool import RankPool
from torchtitan.job import load_config
from torchtitan.mesh.ranks import RankInfo
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.check import ranks as check
from torchtitan.tools.check.ranks import Answer

ROOT = Path(__file__).parents[2]
FINE = Answer(
    machine="a",
    versions={"torch": "2.13", "device": "x"},
    data={"the tokenizer": "1", "text.txt": "2"},
)


def faults_of(answers: list[Answer]) -> list[str]:
    return [fault for faults in check.find_faults(answers).values() for fault in faults]


@pytest.mark.promise("tools")
@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ({"versions": {"torch": "2.9.1", "device": "x"}}, ("torch", "2.9.1", "2.13", "rank 2")),
        ({"versions": {"torch": "2.13"}}, ("device", "missing")),
        ({"data": {"the tokenizer": "1", "text.txt": "3"}}, ("text.txt", "rank 2")),
        ({"data": {"the tokenizer": "1"}}, ("text.txt", "missing")),
        ({"data": None, "faults": {"data": ["no such file"]}}, ("no such file", "rank 2")),
    ],
)
def test_a_planted_fault_is_found(planted: dict[str, Any], said: tuple[str, ...]) -> None:
    fine = [FINE, replace(FINE, machine="b"), replace(FINE, machine="b", data=None)]
    assert faults_of(fine) == []
    [fault] = faults_of([FINE, replace(FINE, machine="b"), replace(FINE, machine="c", **planted)])
    assert all(part in fault for part in (*said, "c")), fault


def test_space_is_measured_and_data_are_known_by_size_and_ends(tmp_path: Path) -> None:
    assert not [*check.find_disk_faults(tmp_path, needed_gib=0.0, marker=None)]
    [fault] = check.find_disk_faults(tmp_path, needed_gib=1e9, marker=None)
    assert "1000000000.0 GiB" in fault
    file, hashes = tmp_path / "text.txt", []
    words = ["--training.dataset=files", f"--training.dataset_path={file}"]
    config = load_config([*write_job(tmp_path), *words])
    for text in ("a" * 200_000, "a" * 199_999 + "b", "b" + "a" * 199_999, "a" * 200_001):
        file.write_text(text)
        hashes.append(check.hash_data(config)[str(file)])
    assert len({*hashes}) == 4


Plant = Callable[[int, Path], AbstractContextManager[Any]] | None


def faults(job: list[str], plant: Plant, folder: Path) -> list[str]:
    """Check, each rank as a machine of its own, with a fault on rank 1."""
    launch = RankInfo(rank=dist.get_rank(), local_rank=0, world_size=dist.get_world_size())
    planted = plant(launch.rank, folder) if plant else contextlib.nullcontext()
    with patch.dict(os.environ, GROUP_RANK=str(launch.rank)), planted:
        config = resolve_model(load_config(job))
        answer = check.find_facts(config, launch, folder=Path(config.job.dump_folder))
    answers: list[Any] = [None] * launch.world_size
    dist.all_gather_object(answers, answer)
    return faults_of(answers)


def other_torch(rank: int, folder: Path) -> AbstractContextManager[Any]:
    return patch.object(torch, "__version__", "2.9.1") if rank else contextlib.nullcontext()


@contextlib.contextmanager
def small_files(rank: int, folder: Path) -> Iterator[None]:
    """Let the machine write no file of more than 1 MiB, as where a quota is used up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20 if rank else before[0], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextlib.contextmanager
def other_folder(rank: int, folder: Path) -> Iterator[None]:
    """Work in another folder, where text.txt has other bytes of the same number."""
    before, own = Path.cwd(), folder / f"machine-{rank}"
    own.mkdir()
    (own / "text.txt").write_text(f"{rank}" * 100)
    os.chdir(own)
    yield
    os.chdir(before)


@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (None, []),
        (other_torch, ["2.9.1"]),
        (small_files, ["File too large"]),
        (other_folder, ["file of rank 0", "text.txt"]),
    ],
)
def test_ranks_find_it(plant: Plant, said: list[str], ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("a" * 100)
    job = [*write_job(tmp_path), "--training.dataset=files", "--metrics.log_freq=1"]
    at = Path() if plant is other_folder else tmp_path
    job += [f"--training.dataset_path={at / 'text.txt'}", f"--job.dump_folder={at / 'run'}"]
    first, second = ranks.run(faults, job, plant, tmp_path, world=2)
    assert first == second
    for part, fault in zip(said, first, strict=True):
        assert part in fault
        assert "(node 1)" in fault


@pytest.mark.slow
def test_damaged_checkpoints_are_found(ranks: RankPool, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    ranks.run(jobs.train, [*job, "--checkpoint.interval=1", "--training.steps=2"], world=2)
    folder = tmp_path / "run" / "checkpoint"
    assert ranks.run(check.find_damage, folder, world=2) == [(2, []), (2, [])]
    file = next((folder / "step-2" / "optimizer").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    (_, [fault]), again = ranks.run(check.find_damage, folder, world=2)
    assert file.name in fault
    assert again == (2, [fault])


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchtitan", "check", *write_job(tmp_path), "--checksums"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert [line.split()[1] for line in run.stdout.splitlines()[1:5]] == ["ok"] * 4
