"""Ranks that hang while a checkpoint is saved, and ranks that are only slow."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import ConfigError, StalledError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.storage import find_steps
from torchtitan.mesh.faults import dump_stacks_on_stall, exit_code_of, is_timeout
from torchtitan.trainer import Trainer


def saved_beside(how: str, seconds: float, job: list[str]) -> str:
    """Save while rank 1 is stopped, or slow, for some seconds; return what came of it."""
    correct = storage._save_tensors

    def late(*args: object, **kwargs: object) -> object:
        if how == "stopped":
            subprocess.Popen(["sh", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
            os.kill(os.getpid(), signal.SIGSTOP)
        time.sleep(seconds if how == "slow" else 0)
        storage._save_tensors = correct
        return correct(*args, **kwargs)  # type: ignore[arg-type]

    if dist.get_rank() == 1:
        storage._save_tensors = late
    trainer = Trainer(jobs.start(job))
    try:
        trainer.train()
        trainer.close()
    except StalledError as error:
        return str(error)
    except Exception as error:  # noqa: BLE001 - rank 1 meets the connection that rank 0 gave up
        return type(error).__name__
    finally:
        storage._save_tensors = correct
    return "saved"


@pytest.mark.promise("hangs")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "limit", "mode"),
    [("stopped", 2, "disabled"), ("stopped", 2, "async"), ("slow", 60, "async")],
)
def test_a_rank_stopped_within_a_save_is_found_and_a_slow_one_is_not(
    how: str, limit: int, mode: str, ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=1", f"--checkpoint.async_mode={mode}"]
    job += [f"--checkpoint.save_timeout_seconds={limit}"]
    first, second = ranks.run(saved_beside, how, 5, job, world=2, timeout=60)
    if how == "slow":
        assert (first, second) == ("saved", "saved")
        assert find_steps(tmp_path / "run" / "checkpoint") == [1]
    else:
        assert "checkpoint.save_timeout_seconds" in first
        assert find_steps(tmp_path / "run" / "checkpoint") == []


def test_the_stacks_of_a_rank_that_hangs_are_in_its_log(tmp_path: Path) -> None:
    """Of every thread, and only where no step follows in time."""
    steps: list[int] = []
    log, held = tmp_path / "rank_0.log", threading.Event()
    log.write_text("before\n")

    def hangs_here() -> None:
        held.wait(60)

    thread = threading.Thread(target=hangs_here, daemon=True)
    thread.start()
    with dump_stacks_on_stall(log, limit_seconds=0.5, on_step=steps.append) as on_step:
        on_step(1)
        deadline = time.monotonic() + 60
        while "hangs_here" not in log.read_text() and time.monotonic() < deadline:
            time.sleep(0.01)
        on_step(2)
    held.set()
    said = log.read_text()
    assert said.startswith("before\nTimeout (0:00:00.45")
    assert "hangs_here" in said
    assert "test_the_stacks_of_a_rank_that_hangs" in said
    assert steps == [1, 2]
    time.sleep(0.7)
    assert log.read_text() == said  # the run is over


@pytest.mark.promise("hangs")
@pytest.mark.parametrize(
    ("error", "world_size", "code"),
    [
        (RuntimeError("[gloo] Timed out waiting 3000ms for recv"), "2", 4),
        (RuntimeError("Connection closed by peer"), "2", 1),
        (RuntimeError("a worker timed out"), "2", 1),
        (TimeoutError("timed out waiting"), "2", 1),
        (RuntimeError("timed out waiting"), "1", 1),
        (StalledError("no data"), "1", 4),
        (ConfigError("no data"), "2", 2),
    ],
)
def test_what_a_rank_leaves_with(
    error: Exception, world_size: str, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", world_size)
    assert exit_code_of(error) == code


def time_out() -> str:
    if dist.get_rank() == 0:
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
        try:
            dist.all_reduce(torch.ones(1), group=group)
        except RuntimeError as error:
            return f"{is_timeout(error)} {error}"
    else:
        dist.new_group(backend="gloo", timeout=timedelta(seconds=1))
        time.sleep(3)
    return ""


@pytest.mark.promise("hangs")
@pytest.mark.slow
def test_gloo_says_that_it_timed_out_as_expected(ranks: RankPool) -> None:
    assert ranks.run(time_out, world=2)[0].startswith("True ")
