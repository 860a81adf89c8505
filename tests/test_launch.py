"""The last paragraph of a failed job: the rank, the cause, the log and the commands to run."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from torchtitan.launch import RunFiles, describe_failure, exit_code_of_job


def failure(codes: dict[int, int]) -> ChildFailedError:
    return ChildFailedError(
        "train",
        {
            rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
            for rank, code in codes.items()
        },
    )


def places(folder: Path, *, since: float = 0.0) -> RunFiles:
    return RunFiles(folder=folder, prefix=folder / "comm_traces" / "rank_", since=since)


def failed(codes: dict[int, int], folder: Path | None, *, since: float = 0.0) -> str:
    of = None if folder is None else places(folder, since=since)
    return describe_failure(failure(codes), of)


def test_a_killed_rank(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    log, records = folder / "logs" / "rank_2.log", folder / "comm_traces"
    for made in (log.parent, records, folder / "checkpoint" / "step-3"):
        made.mkdir(parents=True)
    log.touch()
    said = failed({2: -signal.SIGKILL, 0: 4}, folder)
    assert all(part in said for part in ("rank 2", "SIGKILL", "OOM", str(log), "same command"))
    assert "hang" not in said
    (records / "gloo_0").touch()
    command = f"torchtitan hang '{folder}'"
    assert command in failed({2: -signal.SIGKILL, 0: 1}, folder)
    # the ranks have printed their errors, but neither that it was a hang nor who hangs
    said = failed({0: 4}, folder)
    assert all(part in said for part in ("rank 0", "code 4", "same command", command))
    assert failed({3: 4, 0: 1}, folder) == ""  # rank 3 waited for data, rank 0 for rank 3
    (records / "gloo_0").unlink()
    assert failed({0: 4}, folder) == ""  # a signal or the deadline


@pytest.mark.promise("hangs", "exit-codes")
def test_a_timeout_of_nccl_is_a_hang(tmp_path: Path) -> None:
    """NCCL writes its record and ends the process by SIGABRT; the launcher ends the other ranks."""
    aborted = {1: -signal.SIGABRT, 0: -signal.SIGTERM}
    assert exit_code_of_job(failure(aborted), places(tmp_path)) == 1
    (tmp_path / "comm_traces").mkdir()
    record = tmp_path / "comm_traces" / "rank_1"
    for name in ("rank_0", "gloo_1", "rank_11"):
        (record.parent / name).touch()
    assert exit_code_of_job(failure(aborted), places(tmp_path)) == 1
    record.touch()
    assert exit_code_of_job(failure(aborted), places(tmp_path)) == 4
    said = failed(aborted, tmp_path)
    assert all(part in said for part in ("rank 1", "SIGABRT", "NCCL", "torchtitan hang"))
    assert exit_code_of_job(failure({1: -signal.SIGSEGV}), places(tmp_path)) == 1
    os.utime(record, (1.0, 1.0))  # an earlier run's
    assert exit_code_of_job(failure(aborted), places(tmp_path, since=2.0)) == 1
    assert exit_code_of_job(failure(aborted), None) == 1
