"""Two runs never write to one folder at a time, and a dead one never keeps it."""

from __future__ import annotations

import errno
import fcntl
import os
import platform
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import lock

# the child stands for a forked data worker, which lives on when its parent is killed
HOLDER = """
import os, sys, time
from pathlib import Path
from torchtitan.checkpoint.lock import hold
hold(Path(sys.argv[1]))
child = os.fork()
if child:
    print(child, flush=True)
time.sleep(300)
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", HOLDER, str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    child = int(process.stdout.readline())
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        os.kill(child, signal.SIGKILL)


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
        process.wait()
        lock.hold(folder)
    assert (folder / lock.LOCK).read_text().startswith(f"process {os.getpid()} on host")


@pytest.mark.long
def test_a_run_that_is_ending_is_waited_for(tmp_path: Path) -> None:
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGKILL)
        lock.hold(tmp_path)


def test_a_file_system_without_locks_is_warned_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    lock.hold(tmp_path)
    [said] = [record.getMessage() for record in caplog.records]
    assert naming(tmp_path, "No locks available").match(said)


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
