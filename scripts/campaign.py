"""The parts that campaigns share: start a run, disturb it, compare it with an undisturbed one.

A campaign trains the small job TINY, disturbs it (kills a rank, cuts a connection, stops a node),
and checks at the end that every logged figure and every tensor equals that of an undisturbed run.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from scripts.ports import hold_port
from tests.jobs import TINY
from torchtitan import trainer
from torchtitan.base.errors import DataError
from torchtitan.tools.compare.launch import train

ROOT = Path(__file__).parent.parent
ENVIRON: Mapping[str, str] = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
SAVED, RESUMED = re.compile(r"Saved \S*step-(\d+)"), re.compile(r"Resumed from \S*step-(\d+)")
STEP = re.compile(r"step: +(\d+)")
ENDLESS = 1_000_000
"""Number of steps of a run that a campaign kills."""
Processes = Sequence[subprocess.Popen[bytes]]


class CampaignError(Exception):
    """A run lost data, or failed."""


class Pace:
    """A callback that delays steps until the file `fast` exists in the run's folder.

    Later steps are delayed longer, so that no run ends before a lost node returns.
    """

    def on_start(self, run: trainer.Run) -> None:
        """Find the run's folder."""
        self._fast = run.folder / "fast"

    def on_step(self, step: int, row: object) -> None:
        """Sleep."""
        if not self._fast.exists():
            time.sleep(0.2 if step < 15 else 1.5)


@dataclass(kw_only=True)
class Run:
    """A run of TINY that is started several times."""

    folder: Path
    ranks: int = 1
    options: tuple[str, ...] = ()
    seconds: float = 240
    """Longest time to wait for an event."""
    poll_seconds: float = 0.001
    _port: socket.socket | None = None

    @property
    def results(self) -> Path:
        """The run's dump folder."""
        return self.folder / "run"

    @property
    def log(self) -> str:
        """The log of rank 0 over all starts."""
        path = self.results / "logs" / "rank_0.log"
        return path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""

    @property
    def output(self) -> str:
        """The last lines that each process of the last start wrote."""
        files = sorted(self.folder.glob("output_*.txt"))
        return "\n".join(f"{file.name}:\n{file.read_text()[-3000:]}" for file in files)

    def arguments(self, *, steps: int, results: Path | None = None) -> list[str]:
        """Return the trainer's arguments."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "job.toml").write_text(TINY)
        return [
            f"--job.config_file={self.folder / 'job.toml'}",
            f"--job.dump_folder={results or self.results}",
            f"--training.dataset_cache={self.folder / 'cache'}",
            f"--training.steps={steps}",
            f"--lr_scheduler.total_steps={ENDLESS}",
            *self.options,
        ]

    def start(
        self, *, steps: int = ENDLESS, environ: Mapping[str, str] = MappingProxyType({})
    ) -> list[subprocess.Popen[bytes]]:
        """Start every rank without a launcher, so that one of them can be killed."""
        if self._port is not None:
            self._port.close()
        self._port = hold_port()
        command = [sys.executable, "-m", "torchtitan.train", *self.arguments(steps=steps)]
        shared = {"WORLD_SIZE": str(self.ranks), "MASTER_ADDR": "127.0.0.1"}
        shared["MASTER_PORT"] = str(self._port.getsockname()[1])
        return [
            self.spawn(
                command,
                name=str(rank),
                environ={**environ, **shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            )
            for rank in range(self.ranks)
        ]

    def spawn(
        self, command: Sequence[str], *, name: str, environ: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        """Start a process that writes to `output_<name>.txt`."""
        with (self.folder / f"output_{name}.txt").open("wb") as output:
            return subprocess.Popen(
                command, env={**os.environ, **ENVIRON, **environ}, stdout=output, stderr=output
            )

    def wait_until(
        self, condition: Callable[[], bool], *, what: str, processes: Processes = ()
    ) -> None:
        """Wait for an event.

        Raises:
            CampaignError: It takes too long, or one of `processes` ends before.
        """
        deadline = time.monotonic() + self.seconds
        while not condition():
            codes = [process.poll() for process in processes]
            if time.monotonic() > deadline or any(code is not None for code in codes):
                raise CampaignError(f"no {what}; exit codes {codes}\n{self.output}")
            time.sleep(self.poll_seconds)

    def has_steps(self, count: int, *, after: int) -> bool:
        """Return whether `log[after:]` has so many steps since the last resume in it."""
        text = self.log[after:]
        resumes = list(RESUMED.finditer(text))
        if after and not resumes:
            return False
        return len(STEP.findall(text[resumes[-1].end() if resumes else 0 :])) >= count

    def wait_for_end(self, processes: Processes) -> list[int]:
        """Return the exit codes of the processes.

        Raises:
            CampaignError: One of them does not end.
        """
        deadline = time.monotonic() + self.seconds
        try:
            return [process.wait(max(1, deadline - time.monotonic())) for process in processes]
        except subprocess.TimeoutExpired as error:
            raise CampaignError(f"the run does not end\n{self.output}") from error

    def finish(self, processes: Processes) -> None:
        """Wait for the end of a run that must succeed.

        Raises:
            CampaignError: A process fails, or does not end.
        """
        try:
            if any(codes := self.wait_for_end(processes)):
                raise CampaignError(f"the run ended with exit codes {codes}\n{self.output}")
        finally:
            kill(processes)

    def train_undisturbed(self, *, steps: int, ranks: int) -> Path:
        """Train the same job without a disturbance and return its dump folder."""
        results = self.folder / "undisturbed"
        arguments = self.arguments(steps=steps, results=results)
        log = self.folder / "undisturbed.txt"
        try:
            train(arguments, world_size=ranks, log=log, what="the undisturbed run")
        except DataError as error:
            raise CampaignError(str(error)) from error
        return results


def kill(processes: Processes) -> None:
    """Kill the processes that still run."""
    for process in processes:
        process.kill()
        process.wait()


def steps_in(pattern: re.Pattern[str], log: str) -> list[int]:
    """Return the steps of all matches."""
    return [int(step) for step in pattern.findall(log)]


def compare_runs(undisturbed: Path, disturbed: Path) -> None:
    """Compare every logged figure and every tensor of two runs, bit for bit.

    Raises:
        CampaignError: They differ.
    """
    command = [sys.executable, "-m", "torchtitan", "compare", "runs"]
    done = subprocess.run(
        [*command, str(undisturbed), str(disturbed)],
        env={**os.environ, **ENVIRON},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise CampaignError(f"the runs differ:\n{done.stdout}{done.stderr}")


def build_parser(doc: str | None) -> argparse.ArgumentParser:
    """Return a campaign's parser, with the module's docstring as its help."""
    summary, _, details = (doc or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        description=summary, epilog=details, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", type=Path, help="keep all files here (default: delete them)")
    return parser


def run_campaign(
    campaign: Callable[[argparse.Namespace, Path], str], options: argparse.Namespace
) -> int:
    """Run a campaign in a folder, print its result, and return the exit code."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as temporary:
        try:
            found = campaign(options, options.folder or Path(temporary))
        except CampaignError as error:
            sys.stderr.write(f"failed: {error}\n")
            return 1
    print(f"{found}; {time.monotonic() - started:.0f} s")
    return 0
