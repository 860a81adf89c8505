"""The last paragraph of a failed job: the rank, the cause, the log and the commands to run."""

from __future__ import annotations

import os
import signal
import time
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from torchtitan.launch import _find_folder, describe_failure


def failed(codes: dict[int, int], folder: Path | None, *, since: float = 0.0) -> str:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in codes.items()
    }
    return describe_failure(ChildFailedError("train", failures), folder=folder, since=since)


def test_a_killed_rank(tmp_path: Path) -> None:
    folder = tmp_path / "a run"
    log, records = folder / "logs" / "rank_2.log", folder / "comm_traces"
    for made in (log.parent, records, folder / "checkpoint" / "step-3"):
        made.mkdir(parents=True)
    log.touch()
    said = failed({2: -signal.SIGKILL, 0: 4}, folder)
    assert all(part in said for part in ("rank 2", "SIGKILL", "OOM", str(log), "same command"))
    assert "hang" not in said
    (records / "rank_0.json").touch()
    command = f"python -m torchtitan hang '{folder}'"
    assert command in failed({2: -signal.SIGKILL, 0: 1}, folder)
    # the ranks have printed why they stopped, but not who hangs
    [line] = failed({0: 4}, folder).splitlines()
    assert command in line


def test_what_an_earlier_run_left_is_not_named(tmp_path: Path) -> None:
    for name in ("logs/rank_0.log", "comm_traces/rank_0.json"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1.0, 1.0))
    assert failed({0: 2}, tmp_path, since=time.time()) == ""
    [line] = failed({0: -35}, tmp_path, since=time.time()).splitlines()
    assert "signal 35" in line
    assert "\x1b" not in failed({0: -9}, tmp_path / "a\x1b]0;b\x07")


def test_what_the_ranks_have_printed_is_not_repeated() -> None:
    assert failed({0: 2, 1: -signal.SIGTERM}, None) == ""
    said = failed({1: -signal.SIGSEGV}, None)
    assert "rank 1" in said
    assert "SIGSEGV" in said
    assert "resume" not in said


@pytest.mark.parametrize("program", [["torchtitan.train"], ["torchtitan", "train"]])
def test_the_folder_is_that_of_the_command(program: list[str], tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "job.toml"
    file.write_text(f'[job]\ndump_folder = "{folder}"\n')

    def find(*words: str) -> Path | None:
        first, *rest = (*program, *words)
        return _find_folder(Namespace(training_script=first, training_script_args=rest))

    assert find("--job.config_file", str(file)) == folder
    assert find(f"--job.dump_folder={folder}") == folder
    assert find() == Path("outputs")
    assert find("--job.dump_folder=~nobody_of_this_name/x") is None
    other = Namespace(training_script="other", training_script_args=[f"--job.dump_folder={folder}"])
    assert _find_folder(other) is None
