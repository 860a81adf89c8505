"""Ranks that hang while a checkpoint is saved, and ranks that are only slow."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import ConfigError, StalledError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.folders import find_steps
from torchtitan.mesh.faults import PeerError, Pulse, exit_code_of, stacks_of_stalls
from torchtitan.trainer import Trainer

LIMIT = 0.5


def pulses(world: int) -> list[Pulse]:
    store = dist.HashStore()
    return [Pulse(store, rank=r, world_size=world, limit_seconds=LIMIT) for r in range(world)]


@contextmanager
def save(seconds: float) -> Iterator[Future[None]]:
    """A save that takes so long."""
    future: Future[None] = Future()
    timer = threading.Timer(seconds, lambda: future.set_result(None))
    timer.start()
    yield future
    timer.cancel()


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_slow_save_lives_as_long_as_its_ranks(rank: int) -> None:
    first, second, third = ranks = pulses(3)
    with first.beating(), second.beating(), third.beating(), save(3 * LIMIT) as future:
        ranks[rank].watch(future)
    assert ranks[rank].suspicion() == ""  # nobody saves


@pytest.mark.parametrize(("rank", "silent"), [(0, "ranks 1, 3"), (1, "rank 0"), (3, "rank 0")])
def test_a_silent_rank_is_named(rank: int, silent: str) -> None:
    """Rank 0 looks at all others, which look at rank 0."""
    ranks = pulses(4)
    beating = {0: (0, 2), 1: (1, 2), 3: (1, 3)}[rank]
    with ranks[beating[0]].beating(), ranks[beating[1]].beating(), save(10 * LIMIT) as future:
        with pytest.raises(PeerError, match=f"from {silent} for 0.5 s.*train_timeout_seconds"):
            ranks[rank].watch(future)
        assert silent in ranks[rank].suspicion()


def test_a_store_that_is_gone_is_a_rank_that_is_gone(caplog: pytest.LogCaptureFixture) -> None:
    class Gone(dist.HashStore):
        def add(self, key: str, amount: int) -> int:
            raise dist.DistNetworkError("connection reset by peer")

    pulse = Pulse(Gone(), rank=1, world_size=2, limit_seconds=LIMIT)
    with pulse.beating(), save(10 * LIMIT) as future, pytest.raises(PeerError, match="rank 0"):
        pulse.watch(future)
    assert "connection reset by peer" in caplog.text


def test_one_rank_has_no_peers() -> None:
    [pulse] = pulses(1)
    with pulse.beating(), save(2 * LIMIT) as future:
        pulse.watch(future)


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
    except PeerError as error:
        # the end of this test is another collective, which waits for 2 s: the other rank comes
        # there `seconds` after it stopped, 2 of which have passed
        time.sleep(seconds - 2)
        return str(error)
    finally:
        storage._save_tensors = correct
    return "saved"


@pytest.mark.parametrize("mode", ["disabled", "async"])
@pytest.mark.parametrize("how", ["stopped", "slow"])
def test_a_rank_stopped_within_a_save_is_found_and_a_slow_one_is_not(
    how: str, mode: str, ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=2", f"--checkpoint.async_mode={mode}"]
    job += ["--comm.train_timeout_seconds=2"]
    first, second = ranks.run(saved_beside, how, 5, job, world=2, timeout=60)
    if how == "slow":
        assert (first, second) == ("saved", "saved")
        assert find_steps(tmp_path / "run" / "checkpoint") == [2]
    else:
        assert "no sign of life from rank 1 for 2 s" in first


def test_the_stacks_of_a_rank_that_hangs_are_in_its_log(tmp_path: Path) -> None:
    """Of every thread, and only where no step follows in time."""
    steps: list[int] = []
    log, held = tmp_path / "rank_0.log", threading.Event()
    log.write_text("before\n")

    def hangs_here() -> None:
        held.wait(60)

    thread = threading.Thread(target=hangs_here, daemon=True)
    thread.start()
    with stacks_of_stalls(log, limit_seconds=0.5, on_step=steps.append) as on_step:
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


@pytest.mark.parametrize(
    ("error", "environ", "code"),
    [
        (PeerError("no sign of life"), {"WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "a"}, 5),
        (PeerError("no sign of life"), {"WORLD_SIZE": "2"}, 4),
        (RuntimeError("[gloo] Timed out waiting 3000ms for recv"), {"WORLD_SIZE": "2"}, 4),
        (RuntimeError("Connection closed by peer"), {"WORLD_SIZE": "2"}, 1),
        (RuntimeError("a worker timed out"), {"WORLD_SIZE": "2"}, 1),
        (TimeoutError("timed out waiting"), {"WORLD_SIZE": "2"}, 1),
        (RuntimeError("timed out waiting"), {}, 1),
        (StalledError("no data"), {}, 4),
        (StalledError("no data"), {"TORCHELASTIC_RUN_ID": "a"}, 5),
        (ConfigError("no data"), {"TORCHELASTIC_RUN_ID": "a"}, 2),
    ],
)
def test_what_a_rank_leaves_with(error: Exception, environ: dict[str, str], code: int) -> None:
    assert exit_code_of(error, environ) == code
