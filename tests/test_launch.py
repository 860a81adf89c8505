"""The last paragraph of a failed job: the rank, the cause, the log and the commands to run."""

from __future__ import annotations

import signal
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from torchtitan.job import Config, load_config
from torchtitan.launch import _find_job, describe_failure


def failed(codes: dict[int, int], job: Config | None) -> str:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in codes.items()
    }
    return describe_failure(ChildFailedError("train", failures), job=job)


def test_a_killed_rank(tmp_path: Path) -> None:
    job = load_config([f"--job.dump_folder={tmp_path}/a run", "--checkpoint.enable"])
    log = tmp_path / "a run" / "logs" / "rank_2.log"
    log.parent.mkdir(parents=True)
    log.touch()
    said = failed({2: -signal.SIGKILL, 0: 1}, job)
    assert all(part in said for part in ("rank 2", "SIGKILL", "OOM", str(log), "same command"))
    assert "hang" not in said
    records = tmp_path / "a run" / "comm_traces"
    records.mkdir()
    (records / "rank_0.json").touch()
    command = f"python -m torchtitan hang '{tmp_path}/a run'"
    assert command in failed({2: -signal.SIGKILL, 0: 1}, job)
    # the ranks have printed why they stopped, but not who hangs
    [line] = failed({0: 4}, job).splitlines()
    assert command in line


def test_what_the_ranks_have_printed_is_not_repeated() -> None:
    assert failed({0: 2, 1: -signal.SIGTERM}, None) == ""
    said = failed({1: -signal.SIGSEGV}, None)
    assert "rank 1" in said
    assert "SIGSEGV" in said
    assert "resume" not in said


@pytest.mark.parametrize("program", [["torchtitan.train"], ["torchtitan", "train"]])
def test_the_job_is_found_without_its_modules(program: list[str]) -> None:
    words = [*program, "--job.dump_folder=here", "--training.callbacks=no_such_module:C"]
    job = _find_job(Namespace(training_script=words[0], training_script_args=words[1:]))
    assert job is not None
    assert job.job.dump_folder == "here"


def test_other_programs_have_no_job() -> None:
    words = Namespace(training_script="torchtitan", training_script_args=["check"])
    assert _find_job(words) is None
