"""Each fault that is planted on one rank is found there, and nothing where there is none."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.distributed.jobs import write_job
from tests.distributed.rank_pool import RankPool
from torchtitan.job import Config, load_config
from torchtitan.mesh.dims import ParallelDims, build_mesh
from torchtitan.mesh.ranks import RankInfo
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.check import disks, machines, speed
from torchtitan.tools.check.disks import check_checkpoints, check_data
from torchtitan.tools.check.machines import check_alike, check_memory
from torchtitan.tools.check.ranks import Checked, Ranks, find_ranks
from torchtitan.tools.check.speed import check_axes, check_products

ROOT = Path(__file__).parent.parent.parent.parent
Plant = Callable[[int], contextlib.AbstractContextManager[Any]]


def found(job: list[str], checks: str, plant: Plant, others: list[str] | None = None) -> list[str]:
    """Check, each rank as a machine of its own, with a fault on some; return what is found.

    `others`: what ranks but the first are given in the place of the job.
    """
    launch = RankInfo(rank=dist.get_rank(), local_rank=0, world_size=dist.get_world_size())
    config = resolve_model(load_config(others if others and launch.rank else job))
    with patch.dict(os.environ, GROUP_RANK=str(launch.rank)):
        ranks = find_ranks(launch, device=torch.device("cpu"))
    with plant(launch.rank):
        results = CHECKS[checks](ranks, config)
    return [fault for one in results for fault in one.faults]


def _checkpoints(ranks: Ranks, config: Config) -> list[Checked]:
    return [check_checkpoints(ranks, config, num_parameters=10_000_000)]


def _axes(ranks: Ranks, _: Config) -> list[Checked]:
    dims = ParallelDims(dp_shard=2, tp=2)
    return list(check_axes(ranks, build_mesh(dims, device_type="cpu")))


CHECKS: dict[str, Callable[[Ranks, Config], list[Checked]]] = {
    "alike": lambda ranks, config: [check_alike(ranks, config)],
    "memory": lambda ranks, _: [check_memory(ranks)],
    "checkpoints": _checkpoints,
    "data": lambda ranks, config: [check_data(ranks, config)],
    "products": lambda ranks, _: [check_products(ranks)],
    "axes": _axes,
}


def nothing(rank: int) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext()


def other_torch(rank: int) -> contextlib.AbstractContextManager[Any]:
    return patch.object(torch, "__version__", "2.9.1") if rank == 1 else nothing(rank)


def little_memory(rank: int) -> contextlib.AbstractContextManager[Any]:
    size = 10.0 if rank == 1 else 400.0
    return patch.object(machines, "available_gib", lambda: size)


@contextlib.contextmanager
def small_files(rank: int) -> Iterator[None]:
    """Let the machine write no file of more than 1 MiB, as where a quota is used up."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full_disk(rank: int) -> contextlib.AbstractContextManager[Any]:
    usage = shutil.disk_usage("/")._replace(free=2**20)
    return patch.object(disks.shutil, "disk_usage", lambda _: usage) if rank else nothing(rank)


def throttled(rank: int) -> contextlib.AbstractContextManager[Any]:
    rate = 1e12 if rank == 0 else 1e11  # not a real one: the machine may be busy
    return patch.object(speed, "multiply", lambda *_, **__: rate)


def slow_link(rank: int) -> contextlib.AbstractContextManager[Any]:
    reduce = dist.all_reduce

    def slow(numbers: torch.Tensor, **kwargs: Any) -> Any:
        if numbers.numel() > 1:  # much longer than what a busy machine takes
            time.sleep(0.5)
        return reduce(numbers, **kwargs)

    return patch.object(dist, "all_reduce", slow) if rank == 3 else nothing(rank)


PLANTED: dict[str, tuple[str, Plant, tuple[str, ...]]] = {
    "another version": ("alike", other_torch, ("torch", "2.9.1", "rank 1")),
    "little memory": ("memory", little_memory, ("(agent 1)", "10.0 GiB", "400.0 GiB")),
    "files that cannot grow": ("checkpoints", small_files, ("(agent 1)", "File too large")),
    "a full disk": ("checkpoints", full_disk, ("0.1 GiB", "0.0 GiB", "(agent 1)")),
    "a throttled device": ("products", throttled, ("rank 1 on", "(agent 1)")),
}


@pytest.mark.promise("tools")
@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_fault_is_found(name: str, ranks: RankPool, tmp_path: Path) -> None:
    checks, plant, said = PLANTED[name]
    job = write_job(tmp_path)
    [fault], *others = ranks.run(found, job, checks, plant, world=2)
    assert all(part in fault for part in said), fault
    assert others == [[]]  # they answer; rank 0 judges
    if name != "a throttled device":  # without it the real rates count
        assert ranks.run(found, job, checks, nothing, world=2) == [[], []]


def test_a_folder_that_cannot_be_written(ranks: RankPool, tmp_path: Path) -> None:
    job = [*write_job(tmp_path), "--job.dump_folder=/sys/nobody"]
    first, _ = ranks.run(found, job, "checkpoints", nothing, world=2)
    assert len(first) == 2
    assert all("/sys/nobody" in one for one in first)


@pytest.mark.slow
def test_a_folder_that_is_not_shared(ranks: RankPool, tmp_path: Path) -> None:
    job, other = (write_job(tmp_path, name=name) for name in ("run", "another"))
    [fault], _ = ranks.run(found, job, "checkpoints", nothing, other, world=2)
    assert "(agent 1)" in fault
    in_store = "--checkpoint.folder=s3://bucket/run"  # to which each uploads from its own disk
    with_store = [*job, in_store], [*other, in_store]
    first, _ = ranks.run(found, with_store[0], "checkpoints", nothing, with_store[1], world=2)
    assert first == []
    [fault], _ = ranks.run(found, job, "alike", nothing, other, world=2)
    assert fault.startswith("settings ")


@pytest.mark.parametrize("second", ["b" * 100, None], ids=["other", "none"])
def test_data_that_differ(second: str | None, ranks: RankPool, tmp_path: Path) -> None:
    for folder in "ab":
        (tmp_path / folder).mkdir()
    (tmp_path / "a" / "text.txt").write_text("a" * 100)
    if second is not None:
        (tmp_path / "b" / "text.txt").write_text(second)
    plant = _Elsewhere(tmp_path)
    job = [*write_job(tmp_path), "--training.dataset=files", "--training.dataset_path=text.txt"]
    [fault], _ = ranks.run(found, job, "data", plant, world=2)
    assert "(agent 1)" in fault
    assert "text.txt" in fault
    (tmp_path / "b" / "text.txt").write_text("a" * 100)
    assert ranks.run(found, job, "data", plant, world=2) == [[], []]


class _Elsewhere:
    """Works in a folder of its own on each rank."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def __call__(self, rank: int) -> Iterator[None]:
        before = Path.cwd()
        os.chdir(self.folder / "ab"[rank])
        try:
            yield
        finally:
            os.chdir(before)


@pytest.mark.slow
def test_a_slow_group_is_told_from_the_others(ranks: RankPool, tmp_path: Path) -> None:
    job = write_job(tmp_path)
    first, *_ = ranks.run(found, job, "axes", slow_link, world=4)
    assert len([one for one in first if one.startswith("ranks 2, 3 on")]) >= 1
    assert not [one for one in first if one.startswith("ranks 0, 1 on")]


@pytest.mark.long
def test_the_command(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torchtitan", "check", *write_job(tmp_path)]
    run = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert run.returncode == 0, run.stderr
    assert [line.split()[:2] for line in run.stdout.splitlines()[1:]] == [
        [name, "ok"] for name in ("alike", "memory", "checkpoints", "data", "products")
    ]
    [*_, size, unit] = run.stdout.splitlines()[3].split()
    assert unit == "GiB"
    assert 0 < float(size) < 0.1
    run = subprocess.run(
        [*command, "--model.flavour=x"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 2
    assert "flavour" in run.stderr
    assert "Traceback" not in run.stderr
