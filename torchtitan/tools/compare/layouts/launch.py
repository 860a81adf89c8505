"""Train one layout on this machine, the way run_train.sh does, in a folder of its own.

A layout that is refused, crashes or hangs is an outcome like any other: the comparison goes on.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from torchtitan.base.errors import DataError
from torchtitan.checkpoint.storage import find_steps
from torchtitan.metrics.rows import Row, read_rows
from torchtitan.tools.compare.compare_runs import StoredTensors
from torchtitan.tools.compare.layouts.rank import FLOAT64, GRADIENTS, NUM_STEPS, PIDS, REPLAYED
from torchtitan.tools.compare.layouts.routing import CHOICES

ROOT = Path(__file__).parents[3]
CHECKPOINTS = "checkpoint"
POLL_SECONDS = 0.2
SECONDS_TO_END = 20
NUM_LAST_LINES = 15
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one launch."""

    folder: Path
    seconds: float
    rows: list[Row]
    problem: str
    """Why it did not train to its end; "" if it did."""

    def initial_weights(self) -> StoredTensors:
        """The weights before the first step."""
        return self._weights(min)

    def final_weights(self) -> StoredTensors:
        """The weights after the last one."""
        return self._weights(max)

    def gradients(self, step: int) -> StoredTensors:
        """The gradients of one of the first steps."""
        return StoredTensors(self.folder / GRADIENTS / f"step-{step}", GRADIENTS, skip=())

    @property
    def choices(self) -> Path:
        """Where it wrote down which experts tokens were sent to."""
        return self.folder / CHOICES

    def _weights(self, choose: Callable[[Iterable[int]], int]) -> StoredTensors:
        folder = self.folder / CHECKPOINTS
        return StoredTensors(folder / f"step-{choose(find_steps(folder))}", "model", skip=())


def settings_of_all(*, steps: int) -> tuple[str, ...]:
    """Return the options that make layouts comparable: every step logged, both ends saved."""
    return (
        f"--training.steps={steps}",
        "--metrics.log_freq=1",
        "--checkpoint.enable=true",
        f"--checkpoint.folder={CHECKPOINTS}",
        f"--checkpoint.interval={steps}",
        "--checkpoint.keep_latest_k=0",
        "--checkpoint.async_mode=disabled",
        "--checkpoint.load_step=-1",
        "--metrics.enable_tensorboard=false",
        "--metrics.enable_wandb=false",
    )


def launch(
    arguments: Sequence[str],
    *,
    world_size: int,
    folder: Path,
    timeout_s: float,
    on_wait: Callable[[int, float], None],
    gradient_steps: int = 0,
    replayed: Path | None = None,
    float64: bool = False,
) -> Outcome:
    """Train with the trainer's `arguments`; `on_wait` is told steps done and seconds passed.

    Tokens go to the experts that `replayed` says, the `choices` of another launch, if it is given.
    """
    folder.mkdir(parents=True, exist_ok=True)
    log, metrics = folder / "output.txt", folder / "run" / "metrics.jsonl"
    started, problem = time.monotonic(), ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [
                *_command(world_size, "torchtitan.tools.compare.layouts.rank"),
                *arguments,
                f"--job.dump_folder={folder / 'run'}",
            ],
            env={
                **_environment(world_size),
                NUM_STEPS: str(gradient_steps),
                REPLAYED: str(replayed or ""),
                FLOAT64: "1" if float64 else "",
            },
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not problem:
                seconds = time.monotonic() - started
                on_wait(_count_lines(metrics), seconds)
                time.sleep(POLL_SECONDS)
                if seconds > timeout_s:
                    problem = f"did not end within {timeout_s:g} s{_last_lines(log)}"
        finally:
            _end(process, pids=folder / "run" / PIDS)
    rows = read_rows(metrics) if metrics.is_file() else []
    if not problem and process.returncode:
        problem = f"ended with exit code {process.returncode}{_last_lines(log)}"
    if not problem and not rows:
        problem = f"trained no step{_last_lines(log)}"
    return Outcome(
        folder=folder / "run",
        seconds=time.monotonic() - started,
        rows=rows,
        problem=problem,
    )


def train(
    arguments: Sequence[str],
    *,
    world_size: int,
    log: Path,
    what: str,
    environ: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
) -> None:
    """Train with the trainer itself to the end; what it says goes to `log`.

    Raises:
        DataError: It failed; `what` is what could not be done.
    """
    with log.open("wb") as output:
        done = subprocess.run(
            [*_command(world_size, "torchtitan.train", python=python), *arguments],
            env={**_environment(world_size), **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
    if done.returncode:
        raise DataError(
            f"{what}: the trainer ended with exit code {done.returncode}{_last_lines(log)}"
        )


def _command(world_size: int, module: str, *, python: str = sys.executable) -> list[str]:
    rank = ["-m", module]
    if world_size == 1:
        return [python, *rank]
    launcher = [python, "-m", "torchtitan.launch", "--standalone", "--local_addr=127.0.0.1"]
    return [*launcher, "--nproc_per_node", str(world_size), *rank]


def _environment(world_size: int) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key not in PLACE}
    paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // world_size)))
    if "lo" in (name for _, name in socket.if_nameindex()):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's own name may lead elsewhere
    return environ


def _end(process: subprocess.Popen[bytes], *, pids: Path) -> None:
    """End what still runs; the launcher, where there is one, clears up after its ranks."""
    if process.poll() is not None:
        return
    process.terminate()  # for ranks that have not left their number yet
    for pid in pids.iterdir() if pids.is_dir() else ():
        with suppress(ProcessLookupError):  # it has ended already
            os.kill(int(pid.name), signal.SIGKILL)  # one that hangs hears nothing else
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _count_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def _last_lines(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line for line in lines if line.strip()][-NUM_LAST_LINES:] or ["(it said nothing)"]
    return "\n".join(["; its last lines:", *(f"    {line}" for line in said)])
