"""The report of a run that is out of memory: what it says, how long it takes, who waits for it."""

from __future__ import annotations

import io
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.distributed.jobs import places_of_ranks
from tests.plan.jobs import planned
from torchtitan.job import load_config
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.plan import memory, ran_out
from torchtitan.plan.__main__ import main
from torchtitan.plan.ran_out import (
    SECONDS_BEFORE_TIMEOUT,
    SECONDS_TO_END,
    SECONDS_TO_PLAN,
    instead_of_muon,
    plan_after,
    seconds_to_plan,
)

ROOT = Path(__file__).parent.parent.parent
train = import_module("torchtitan.train")  # `from torchtitan import` gives the function


def test_the_account_is_out_before_settings_are_searched_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not in a buffer either: the search may be ended."""
    planned(tmp_path)
    written = io.BytesIO()
    before: list[str] = []

    def search(*_: object, **__: object) -> str:
        before.append(written.getvalue().decode())
        return "the nearest settings"

    monkeypatch.setattr(memory, "describe_nearest", search)
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, write_through=False))
    job = f"--job.config_file={tmp_path / 'job.toml'}"
    assert main(["memory", "--ran_out", "--world_size=1", job]) == 0
    for part in ("live at the peak", "fits: H100", "then most is held by:", "Not modelled"):
        assert part in before[0]
    assert written.getvalue().decode() == f"{before[0]}\nthe nearest settings\n"


PLANNER = """
import subprocess, sys, time
print("the account, written whole", flush=True)
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, end=" half a line", flush=True)
print("", flush=True)
try:
    time.sleep(600)
finally:  # as a pool of processes does
    child.kill()
    child.wait()
"""


@pytest.fixture
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings to read: the planner is another program."""
    monkeypatch.setattr(ran_out, "instead_of_muon", lambda argv: [])


def says(command: Sequence[str], seconds: float = 600) -> Iterator[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ran_out, "planning_command", lambda *_, **__: list(command))
        parts = plan_after([], world_size=1, seconds=seconds)
        assert f"What the plan of this job says, by python {shlex.join(command)}" in next(parts)
        yield from parts


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Ctrl-C as it is by default, in what is started here too: whoever runs tests may ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("no_job", "interruptible")
def test_what_was_found_in_time_is_said_and_how_to_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    command = ["-c", PLANNER]
    parts = says(command, seconds=60)
    text = ""
    while "half a line" not in text:  # at once, while the planner goes on
        text += next(parts) + "\n"
    assert text.startswith("the account, written whole\n")
    pid = int(text.split()[-4])
    later = SimpleNamespace(monotonic=lambda: float("inf"), sleep=time.sleep)
    monkeypatch.setattr(ran_out, "time", later)
    try:
        assert list(parts) == [
            "\nThe search for settings was ended after 60 s; to run it at leisure: "
            f"python {shlex.join(command)}"
        ]
        with pytest.raises(ProcessLookupError):  # nothing goes on computing
            os.kill(pid, 0)
    finally:
        subprocess.run(["kill", "-9", str(pid)], capture_output=True, check=False)


@pytest.mark.usefixtures("no_job", "interruptible")
def test_a_planner_without_an_account_says_that() -> None:
    [said] = says(["-c", "import time; time.sleep(600)"], seconds=0)
    assert said.startswith("The planner was ended after 0 s, with no account yet; to run it at ")


@pytest.mark.usefixtures("no_job")
def test_a_planner_that_cannot_be_interrupted_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ran_out, "SECONDS_TO_END", 0.1)
    deaf = "import signal, time; signal.signal(2, signal.SIG_IGN); print('deaf', flush=True)"
    parts = says(["-c", f"{deaf}; time.sleep(600)"])
    assert next(parts) == "deaf"
    later = SimpleNamespace(monotonic=lambda: float("inf"), sleep=time.sleep)
    monkeypatch.setattr(ran_out, "time", later)
    assert "was ended after 600 s" in next(parts)


@pytest.mark.usefixtures("no_job")
@pytest.mark.parametrize(
    ("ending", "said"),
    [
        ("raise SystemExit('a rule')", "a rule\n"),
        ("import os; os.kill(os.getpid(), 9)", "The planner was ended by signal 9; to run it"),
    ],
)
def test_a_planner_that_fails_says_why(ending: str, said: str) -> None:
    """What it had is said all the same."""
    account, why = says(["-c", f"print('the account', flush=True); {ending}"])
    assert account == "the account"
    assert why.startswith(said)


def test_the_planner_ends_before_other_ranks_give_up() -> None:
    assert seconds_to_plan(None) == SECONDS_TO_PLAN == 90  # nobody waits
    limits = {1: 0.5, 20: 10, 30: 15, 60: 45, 100: 85, 105: 90, 300: 90}
    assert {timeout: seconds_to_plan(timeout) for timeout in limits} == limits
    assert SECONDS_TO_END < SECONDS_BEFORE_TIMEOUT


@pytest.mark.parametrize(
    "settings",
    [
        [],
        ["--optimizer.muon_momentum=0.9"],
        ['--optimizer.muon_excluded_params=["output.*"]', "--optimizer.options.amsgrad=true"],
    ],
)
def test_muon_is_planned_as_adamw(
    settings: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned(tmp_path)
    job = [f"--job.config_file={tmp_path / 'job.toml'}", *settings]
    muon = [*job, "--optimizer.name=Muon"]
    config = load_config([*muon, *instead_of_muon(muon)])
    assert config.optimizer.name == "AdamW"
    assert config.optimizer.muon_momentum == OptimizerConfig().muon_momentum
    assert config.optimizer.options == load_config(muon).optimizer.options
    monkeypatch.setattr(ran_out, "_run", lambda command, seconds: iter([shlex.join(command)]))
    header, command = plan_after(muon, world_size=1, seconds=0)
    assert "it cannot rehearse Muon, so it takes AdamW, which needs more memory" in header
    assert "--optimizer.name=AdamW" in command
    monkeypatch.setattr(memory, "describe_nearest", lambda *_, **__: "")
    assert main(shlex.split(command)[2:]) == 0


def test_other_optimizers_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned(tmp_path)
    job = [f"--job.config_file={tmp_path / 'job.toml'}", "--optimizer.name=SGD"]
    monkeypatch.setattr(ran_out, "_run", lambda command, seconds: iter([shlex.join(command)]))
    header, command = plan_after(job, world_size=1, seconds=0)
    assert "Muon" not in header
    assert command.endswith("--optimizer.name=SGD")
    (tmp_path / "job.toml").unlink()
    assert instead_of_muon(job) == []  # the planner says what is wrong


def test_ranks_wait_longer_than_the_planner_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    monkeypatch.setattr(train, "await_report", waits.append)
    train._await_plan()
    assert waits[0] > SECONDS_TO_PLAN + SECONDS_TO_END


RANKS = """
import os, sys, time
from importlib import import_module
from pathlib import Path

import torch
from torchtitan.base.errors import ConfigError
from torchtitan.mesh.process_group import job_store
from torchtitan.mesh.settings import CommConfig

train = import_module("torchtitan.train")
error, folder = sys.argv[1], Path(sys.argv[2])
await_report = train.await_report

def until(name, seconds):
    for _ in range(10 * seconds):
        if (folder / name).exists():
            return True
        time.sleep(0.1)
    return False

def meet(argv, *, stop, undo):
    launch = train.prepare_process(undo)
    comm = CommConfig(init_timeout_seconds=40)
    train.init_process_group(launch, device_type="cpu", settings=comm, dump_folder=folder)
    if launch.rank == 0:  # the second: it holds the store, which so is there to be asked
        assert until("begun", 120)
        if error == "mistake":
            raise ConfigError("a setting must be another")
    raise torch.OutOfMemoryError("full")

def plan(argv, *, world_size, seconds):
    print(f"may take {seconds:g} s", file=sys.stderr)
    (folder / "begun").touch()
    assert until("waits", 120)
    # time to leave, for a rank that does not wait
    yield "the other has left" if until("leaves", 2) else "the plan"
    (folder / "said").touch()

def wait(seconds):
    print(f"waits {seconds:g} s", file=sys.stderr)
    (folder / "waits").touch()
    await_report(seconds)
    (folder / "leaves").touch()
    print("was told" if job_store().check(["reported"]) else "was not told", file=sys.stderr)

train.train, train.plan_after, train.await_report = meet, plan, wait
train.train_and_leave([])
"""


@pytest.mark.usefixtures("warm_starts")
@pytest.mark.parametrize("error", ["full", "mistake"])
def test_a_second_rank_outlives_the_report_of_the_first(error: str, tmp_path: Path) -> None:
    """Whatever it has met: the launcher would end the first one. And it leaves when that is out."""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", RANKS, error, str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place in places_of_ranks(2)
    ]
    try:
        second, first = (rank.communicate(timeout=150)[1] for rank in ranks)
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [2, 2], (first, second)
    assert first.count("rank 1 has run out of its device's memory: full\n") == 1
    assert first.endswith("\nthe plan\n"), (first, second)
    assert (tmp_path / "said").exists()
    assert second.endswith("was told\n"), second
    assert ("a setting must be another\n" in second) == (error == "mistake")
    assert "has run out" not in second
    [may_take], [waits] = re.findall(r"may take (\d+)", first), re.findall(r"waits (\d+)", second)
    assert 0 < int(may_take) < int(waits)
    assert int(may_take) < 40  # the timeout


def test_a_report_that_fails_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[bool] = []
    for name, value in {
        "begin_report": lambda: True,
        "end_report": lambda: ended.append(True),
        "plan_after": lambda *_, **__: open("/nowhere/full"),  # noqa: SIM115
    }.items():
        monkeypatch.setattr(train, name, value)
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 1)
    with pytest.raises(FileNotFoundError):
        train._report_ran_out(torch.OutOfMemoryError("full"), [])
    assert ended == [True]
