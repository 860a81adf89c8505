"""The last paragraph of a failed job: the rank, the cause, the log and the commands to run."""

from __future__ import annotations

import signal
from argparse import Namespace
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from torchtitan.job import load_config, write_config
from torchtitan.launch import _find_job, describe_failure
from torchtitan.resume_rules import Job


def failed(codes: dict[int, int], job: Job | None) -> str:
    failures = {
        rank: ProcessFailure(local_rank=rank, pid=1, exitcode=code, error_file="")
        for rank, code in codes.items()
    }
    return describe_failure(ChildFailedError("train", failures), job=job)


def test_a_killed_rank(tmp_path: Path) -> None:
    job = Job(config=load_config([f"--job.dump_folder={tmp_path}/a run", "--checkpoint.enable"]))
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
def test_the_settings_are_found_in_the_folder(program: list[str], tmp_path: Path) -> None:
    folder, file = tmp_path / "run", tmp_path / "job.toml"
    file.write_text(f'[job]\ndump_folder = "{folder}"\n')

    def find(*words: str) -> Job | None:
        _, *rest = words = (*program, *words)
        return _find_job(Namespace(training_script=words[0], training_script_args=rest))

    assert find("--job.config_file", str(file)) is None
    config = load_config([f"--job.dump_folder={folder}"])
    write_config(config)
    for words in (["--job.config_file", str(file)], [f"--job.dump_folder={folder}"]):
        job = find(*words)
        assert job is not None
        assert job.config.job.dump_folder == str(folder)
    words = Namespace(training_script="other", training_script_args=[f"--job.dump_folder={folder}"])
    assert _find_job(words) is None
