"""The launcher of ranks: train on this machine, like run_train.sh, with the output in a file."""

from __future__ import annotations

import math
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType

from torchtitan.base.errors import DataError

ROOT = Path(__file__).parents[3]
POLL_SECONDS = 0.2
SECONDS_TO_SAVE, SECONDS_TO_END = 10, 60
"""Until ranks that got a signal are killed, and until their launcher is (torch before 2.13 gives
ranks 30 seconds)."""
NUM_LAST_LINES = 15
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def train(
    arguments: Sequence[str],
    *,
    world_size: int,
    log: Path,
    what: str,
    environ: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
) -> None:
    """Train to the end.

    Args:
        arguments: The trainer's.
        world_size: Number of ranks.
        log: File for the output.
        what: Start of the message if it fails.
        environ: Variables to add to the environment.
        python: Interpreter of the ranks.

    Raises:
        DataError: The trainer failed; with the last lines of its output.
    """
    problem = run_ranks(arguments, world_size=world_size, log=log, environ=environ, python=python)
    if problem:
        raise DataError(f"{what}: the trainer {problem}")


def run_ranks(
    arguments: Sequence[str],
    *,
    world_size: int,
    log: Path,
    module: str = "torchtitan.train",
    environ: Mapping[str, str] = MappingProxyType({}),
    python: str = sys.executable,
    timeout_s: float = math.inf,
    on_wait: Callable[[float], None] = lambda seconds: None,
) -> str:
    """Run `module` on ranks until they end, and return the reason if they failed, otherwise "".

    `on_wait` is called with the passed seconds. Ranks never outlive this call.
    """
    launcher = ["torchtitan.launch", "--standalone", "--local_addr=127.0.0.1"]
    launcher += [f"--nproc_per_node={world_size}", "-m"]
    command = [python, "-m", *(launcher if world_size > 1 else ()), module, *arguments]
    start, problem = time.monotonic(), ""
    with log.open("wb") as output, _signals_as_exceptions():
        process = subprocess.Popen(
            command,
            env={**_environment(world_size), **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            while process.poll() is None and not problem:
                on_wait(time.monotonic() - start)
                time.sleep(POLL_SECONDS)
                if time.monotonic() - start > timeout_s:
                    problem = f"did not end within {timeout_s:g} s"
        finally:
            _end(process)
    if not problem and process.returncode:
        problem = f"ended with exit code {process.returncode}"
    return problem and problem + last_lines(log)


def _environment(world_size: int) -> dict[str, str]:
    environ = {key: value for key, value in os.environ.items() if key not in OF_A_RANK}
    paths = [str(ROOT), *filter(None, [environ.get("PYTHONPATH")])]
    environ["PYTHONPATH"] = os.pathsep.join(paths)
    environ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SECONDS_TO_SAVE)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    environ.setdefault("OMP_NUM_THREADS", str(max(1, (cores or 1) // world_size)))
    if "lo" in (name for _, name in socket.if_nameindex()):
        environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may resolve elsewhere
    return environ


@contextmanager
def _signals_as_exceptions() -> Iterator[None]:
    """Raise SystemExit for signals that end this process, so that `finally` ends the ranks."""
    signals = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(each, lambda number, frame: sys.exit(128 + number)) for each in signals]
    try:
        yield
    finally:
        for each, handler in zip(signals, before, strict=True):
            signal.signal(each, handler)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process if it still runs. A launcher ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(SECONDS_TO_END)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def last_lines(log: Path) -> str:
    """Return the end of an output, for a message."""
    lines = log.read_text(encoding="utf-8", errors="replace").splitlines()
    shown = [line for line in lines if line.strip()][-NUM_LAST_LINES:] or ["(no output)"]
    return "\n".join(["; its last lines:", *(f"    {line}" for line in shown)])
