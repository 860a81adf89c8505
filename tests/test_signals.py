"""The trainer as a scheduler or a person ends it: signals, the deadline, exit codes, no traceback.

Each job is a process with ranks of its own. Its log files show what it does, and no signal is sent
before the log shows that the moment has come. Jobs start warm (tests/warm_python.py) except the
campaigns marked `long`, which start the real interpreter."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from tests.distributed.jobs import read_rows, write_job
from tests.jobs import TINY
from torchtitan.checkpoint.storage import find_steps

ROOT = Path(__file__).parent.parent
LONG = TINY.replace("steps = 20", "steps = 1000000") + "async_mode = '{mode}'\n"
STEP, SECONDS = "step:      3", 300
TRACEBACK = re.compile(r"Traceback .*\n(?!.*multiprocessing/forkserver)")
"""Of ours: a data worker that still starts when its parent ends prints one that is Python's."""


class Job:
    """A running job; `process` is its launcher, or its one rank."""

    def __init__(
        self,
        folder: Path,
        *overrides: str,
        ranks: int = 1,
        mode: str = "disabled",
        python: str | Path = sys.executable,
        **environ: str,
    ) -> None:
        self.folder = folder / "run"
        arguments = [*write_job(folder, LONG.format(mode=mode)), *overrides]
        launcher = ["-m", "torchtitan.launch", f"--nproc_per_node={ranks}"] if ranks > 1 else []
        self.process = subprocess.Popen(
            [str(python), *launcher, "-m", "torchtitan.train", *arguments],
            env={
                **os.environ,
                **{"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "LOG_RANK": "all"},
                **environ,
            },
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,  # a group of its own, as a shell or Slurm would make
        )

    def log(self, rank: int = 0) -> str:
        path = self.folder / "logs" / f"rank_{rank}.log"
        return path.read_text() if path.is_file() else ""

    def wait_for(self, text: str, *, rank: int = 0) -> None:
        self.wait_until(lambda: text in self.log(rank))

    def wait_until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + SECONDS
        while not condition():
            assert self.process.poll() is None, self.process.communicate()[1]
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(self.log())
            time.sleep(0.01)

    def end(self) -> tuple[int, str]:
        try:
            _, errors = self.process.communicate(timeout=SECONDS)
        finally:
            self.kill()
        assert not TRACEBACK.search(errors), errors
        return self.process.returncode, errors

    def kill(self) -> None:
        if self.process.poll() is None:
            for pid in [*self.rank_pids(), self.process.pid]:  # ranks outlive their launcher
                os.kill(pid, signal.SIGKILL)

    def rank_pids(self) -> list[int]:
        """Return the processes of the ranks, found by folder and RANK: a warm one is no child."""
        found = {}
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.folder) in (process / "cmdline").read_text():
                    environ = (process / "environ").read_text().split("\0")
                    found |= {word: int(process.name) for word in environ if word[:5] == "RANK="}
            except OSError:  # it has ended, or is another user's
                continue
        return [pid for _, pid in sorted(found.items())]


Start = Callable[..., Job]


@pytest.fixture
def start(warm_python: Path) -> Start:
    return partial(Job, python=warm_python)


def saved_step(job: Job) -> int:
    """The one checkpoint, which is that of the last step done."""
    [step] = find_steps(job.folder / "checkpoint")
    assert read_rows(job.folder)[-1]["step"] == step
    return step


RARELY = "--checkpoint.interval=1000000"
HANGS = "--training.dataset=tests.own_faults:Hangs"
# ranks, what is waited for, the signal, the rank that gets it (else the process), options
SAVES: dict[str, tuple[int, str, int, int | None, tuple[str, ...]]] = {
    "SIGTERM": (1, STEP, signal.SIGTERM, None, (RARELY,)),
    "SIGINT": (1, STEP, signal.SIGINT, None, (RARELY,)),
    # saves follow one another closely, so that the signal falls into one or right beside it
    "launcher": (
        2,
        "Saved",
        signal.SIGTERM,
        None,
        ("--checkpoint.interval=2", "--checkpoint.keep_latest_k=1"),
    ),
    "one rank": (2, STEP, signal.SIGUSR1, 1, (RARELY,)),
    # step 8 is the last for which there are data
    "no data": (1, "step:      8", signal.SIGTERM, None, (RARELY, HANGS)),
    "no data of workers": (
        1,
        "step:      8",
        signal.SIGTERM,
        None,
        (RARELY, HANGS, "--training.dataloader.num_workers=1"),
    ),
}


@pytest.mark.promise("signals")
@pytest.mark.slow(gate=["SIGTERM"])
@pytest.mark.parametrize("case", SAVES)
def test_a_signal_saves_and_the_next_start_goes_on(case: str, tmp_path: Path, start: Start) -> None:
    ranks, text, number, receiver, options = SAVES[case]
    job = start(tmp_path, *options, ranks=ranks, mode="async" if ranks > 1 else "disabled")
    job.wait_for(text)
    os.kill(job.process.pid if receiver is None else job.rank_pids()[receiver], number)
    code, errors = job.end()
    assert code == 4, errors
    step = saved_step(job)
    assert errors.count(f"stopped after step {step} of 1000000 by a signal") == 1
    if case == "SIGTERM":
        again = start(tmp_path, "--job.time_limit_seconds=1")
        code, errors = again.end()
        assert code == 4, errors
        assert "by its deadline, job.time_limit_seconds" in errors
        assert f"Resumed from {job.folder}/checkpoint/step-{step}" in errors
        assert find_steps(job.folder / "checkpoint")[-1] > step


@pytest.mark.long
def test_a_signal_during_set_up(tmp_path: Path) -> None:
    """The first lines of the log come before data, model and group are there."""
    job = Job(tmp_path, ranks=2)
    job.wait_until(lambda: all(job.log(rank) for rank in range(2)))
    job.process.send_signal(signal.SIGTERM)
    code, errors = job.end()
    assert code == 4, errors
    assert not find_steps(job.folder / "checkpoint") or "Saved" in job.log()


@pytest.mark.promise("signals")
@pytest.mark.slow
def test_a_second_signal_ends_the_process_at_once(tmp_path: Path, start: Start) -> None:
    """Without saving, though a step goes on and on."""
    job = start(tmp_path, "--training.callbacks=tests.own_faults:SleepsAfterStep3")
    job.wait_for(STEP)
    job.process.send_signal(signal.SIGTERM)
    job.wait_for("stopping after this step")
    time.sleep(1.1)  # one request is what comes within a second
    assert job.process.poll() is None
    job.process.send_signal(signal.SIGTERM)
    code, errors = job.end()
    assert code == 128 + signal.SIGTERM
    assert "SIGTERM again: quitting" in errors
    assert "\x1b" not in errors  # no terminal


@pytest.mark.slow
def test_ranks_end_with_their_launcher(tmp_path: Path) -> None:
    """Not warm: the ranks must be its children."""
    job = Job(tmp_path, ranks=2)
    job.wait_for(STEP)
    assert len(job.rank_pids()) == 2
    job.process.kill()
    deadline = time.monotonic() + SECONDS
    try:
        while pids := job.rank_pids():
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
    assert saved_step(job) >= 3


SOON = "--comm.train_timeout_seconds=5"
# ranks, options, what the second rank gets, exit code, what is said
FAILS: dict[str, tuple[int, tuple[str, ...], int | None, int, str]] = {
    "own code ends the process": (
        2,
        ("--training.dataset=tests.own_faults:Leaves",),
        None,
        1,
        "os._exit",
    ),
    "a killed rank": (2, (), signal.SIGKILL, 1, "rank 1: -9"),
    "a rank that hangs": (2, (SOON,), signal.SIGSTOP, 4, "Timed out"),
    "data that never come": (1, (HANGS, SOON), None, 4, "own_faults.py"),
    "workers that never answer": (
        2,
        (HANGS, SOON, "--training.dataloader.num_workers=1"),
        None,
        4,
        "data workers (process",
    ),
}


@pytest.mark.promise("exit-codes", "hangs")
@pytest.mark.slow
@pytest.mark.parametrize("case", FAILS)
def test_a_fault_ends_all_ranks_with_its_code(case: str, tmp_path: Path, start: Start) -> None:
    ranks, options, number, code, said = FAILS[case]
    # a warm rank is a child of the process that would be stopped
    begin = Job if number == signal.SIGSTOP else start
    job = begin(tmp_path, *options, ranks=ranks)
    if number is not None:
        job.wait_for(STEP)
        first, second = job.rank_pids()
        os.kill(second, number)
        job.wait_until(lambda: first not in job.rank_pids())
        if number == signal.SIGSTOP:
            os.kill(second, signal.SIGKILL)
    _, errors = job.process.communicate(timeout=SECONDS)
    assert job.process.returncode == code, errors
    assert said in errors
