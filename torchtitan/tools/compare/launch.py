"""The launcher of ranks: train on this machine, like run_train.sh, with the output in a file."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

from torchtitan.data.prepare import num_cores

ROOT = Path(__file__).parents[3]
SECONDS_TO_SAVE, SECONDS_TO_END = 10, 60
"""Until ranks that got a signal are killed, and until their launcher is (torch before 2.13 gives
ranks 30 seconds)."""
NUM_LAST_LINES = 15
OF_A_RANK = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


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

    `log` receives the output. The ranks are ended after `timeout_s` seconds, and if this call ends
    with an exception, as for Ctrl-C.
    """
    launcher = ["torchtitan.launch", "--standalone", "--local_addr=127.0.0.1"]
    launcher += [f"--nproc_per_node={world_size}", "-m"]
    command = [sys.executable, "-m", *(launcher if world_size > 1 else ()), module, *arguments]
    environment = {key: value for key, value in os.environ.items() if key not in OF_A_RANK}
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment |= {"PYTHONPATH": os.pathsep.join(paths)}
    environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"] = str(SECONDS_TO_SAVE)
    environment.setdefault("OMP_NUM_THREADS", str(max(1, num_cores() // world_size)))
    if "lo" in (name for _, name in socket.if_nameindex()):
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may resolve elsewhere
    problem = ""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**environment, **environ},
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
