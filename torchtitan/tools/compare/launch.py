"""The launcher of ranks: train on this machine, like run_train.sh, with the output in a file."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchtitan.base.errors import DataError

ROOT = Path(__file__).parents[3]
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
) -> None:
    """Train to the end. If that fails, raise DataError with `what` and the end of the output."""
    if problem := run_ranks(arguments, world_size=world_size, log=log, environ=environ):
        raise DataError(f"{what}: the trainer {problem}")


def run_ranks(
    arguments: Sequence[str],
    *,
    world_size: int,
    log: Path,
    module: str = "torchtitan.train",
    environ: Mapping[str, str] = MappingProxyType({}),
    timeout_s: float | None = None,
) -> str:
    """Run `module` on ranks until they end, and return the reason if they failed, otherwise "".

    Ranks never outlive this call.

    `log` receives the output; after `timeout_s` seconds the ranks are ended.
    """
    launcher = ["torchtitan.launch", "--standalone", "--local_addr=127.0.0.1"]
    launcher += [f"--nproc_per_node={world_size}", "-m"]
    command = [sys.executable, "-m", *(launcher if world_size > 1 else ()), module, *arguments]
    problem = ""
    with log.open("wb") as output, _sigterm_as_exception():
        process = subprocess.Popen(
            command,
            env={**_environment(world_size), **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            problem = f"did not end within {timeout_s:g} s"
        finally:
            end(process)
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
def _sigterm_as_exception() -> Iterator[None]:
    """Raise SystemExit for SIGTERM, so that `finally` ends the ranks, as for Ctrl-C."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def end(process: subprocess.Popen[Any]) -> None:
    """End the process if it still runs. A launcher ends its ranks, which have other sessions."""
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
    tail = [line for line in lines if line.strip()][-NUM_LAST_LINES:] or ["(no output)"]
    return "\n".join(["; its last lines:", *(f"    {line}" for line in tail)])
