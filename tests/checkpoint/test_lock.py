"""Two runs never write to one folder at a time, and a dead one never keeps it."""

from __future__ import annotations

import multiprocessing
import os
import platform
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool, start_server
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import lock


def hold(folder: Path, pipe: Connection) -> None:
    """Hold a folder; a child stands for a forked data worker, which outlives its parent."""
    lock.hold(folder)
    child = os.fork()
    if child:
        pipe.send(child)
    time.sleep(300)


@contextmanager
def holder(folder: Path) -> Iterator[BaseProcess]:
    start_server()
    context = multiprocessing.get_context("forkserver")
    ours, theirs = multiprocessing.Pipe()
    process = context.Process(target=hold, args=(folder, theirs))
    process.start()
    child = ours.recv()
    try:
        yield process
    finally:
        process.kill()
        process.join()
        os.kill(child, signal.SIGKILL)


@pytest.mark.promise("one-run-per-folder")
@pytest.mark.slow
def test_a_folder_has_one_holder_until_that_one_is_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "SECONDS_TO_END", 0.2)
    folder = tmp_path / "runs" / "one"
    with holder(folder) as process:
        its = f"process {process.pid} on host {platform.node()}"
        with pytest.raises(CheckpointError, match=naming("job.dump_folder", folder, its)):
            lock.hold(folder)
        lock.hold(tmp_path / "runs" / "two")
        process.kill()
        process.join()
        lock.hold(folder)
    assert (folder / lock.LOCK).read_text().startswith(f"process {os.getpid()} on host")


@pytest.mark.promise("one-run-per-folder")
@pytest.mark.slow
def test_a_second_run_is_refused_on_all_ranks_before_it_writes(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = jobs.write_job(tmp_path)
    draft = tmp_path / "run" / "checkpoint" / ".step-4.tmp"
    draft.mkdir(parents=True)
    with holder(tmp_path / "run"):
        for message in ranks.run(jobs.refusal, job, world=2):
            assert naming("job.dump_folder", tmp_path / "run").match(message)
        assert sorted(p.name for p in (tmp_path / "run").iterdir()) == [".lock", "checkpoint"]
        assert draft.is_dir()
    assert ranks.run(jobs.refusal, job, world=2) == ["no error"] * 2
