"""Start the trainer's command on several ranks without importing torch for each of them.

The ranks are forks of this process, which has imported all modules of the command. Libraries choose
CPU instructions when they are loaded, so `pin_instructions` restarts this Python with an
environment in which they choose the oldest ones:

    ATEN_CPU_CAPABILITY   torch's own kernels
    MKL_CBWR              matrix products of MKL; only COMPATIBLE is the same on all CPUs
    ONEDNN_MAX_CPU_ISA    matrix products of oneDNN
    GLIBC_TUNABLES        exp, log, sin and pow of the C library, whose last digits FMA changes
"""

from __future__ import annotations

import gc
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from scripts.golden.jobs import Job, Leg
from scripts.ports import hold_port

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "ONEDNN_MAX_CPU_ISA": "SSE41",
    # the names with _Usable are those of glibc before 2.33
    "GLIBC_TUNABLES": "glibc.cpu.hwcaps=-AVX2,-FMA,-FMA4,-AVX2_Usable,-FMA_Usable,-FMA4_Usable",
    "OMP_NUM_THREADS": "1",
    "PYTHONPATH": str(ROOT),
}
PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOG_RANK")
SECONDS_FOR_A_LEG = 300


class RunError(Exception):
    """A job failed or timed out."""


def pin_instructions(argv: Sequence[str]) -> None:
    """Start this Python again, with `argv`, where ENVIRONMENT is not set yet."""
    if any(os.environ.get(key) != value for key, value in ENVIRONMENT.items()):
        environ = {key: value for key, value in os.environ.items() if key not in PLACE}
        os.execve(sys.executable, [sys.executable, *argv], environ | ENVIRONMENT)


def preload() -> None:
    """Import what the trainer needs, for all forks."""
    import torchtitan.train  # noqa: F401

    add_smallest()
    gc.freeze()


def add_smallest() -> None:
    """Add a flavor to Llama whose checkpoints are small enough for git."""
    from torchtitan.models.families import MODELS

    flavors = MODELS["llama3"].flavors
    assert isinstance(flavors, dict)
    flavors["smallest"] = replace(
        flavors["tiny"], dim=8, num_heads=2, num_kv_heads=1, hidden_dim=16, vocab_size=258
    )


def run_job(job: Job, *, folder: Path, data: Path) -> None:
    """Run a job into `folder`, which does not exist yet, on the text in `data`, which is above it.

    Raises:
        RunError: A leg failed.
    """
    for leg in job.legs:
        run = f"--job.dump_folder={folder.relative_to(data)}"
        arguments = ["--job.config_file=base.toml", run, *leg.options]
        _run_leg(arguments, leg=leg, data=data)


def _run_leg(arguments: Sequence[str], *, leg: Leg, data: Path) -> None:
    with hold_port() as place:
        _run_ranks(arguments, leg=leg, data=data, port=place.getsockname()[1])


def _run_ranks(arguments: Sequence[str], *, leg: Leg, data: Path, port: int) -> None:
    ranks, outputs = [], []
    for rank in range(leg.ranks):
        environ = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(leg.ranks)}
        environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        outputs.append(data / f"output_{os.getpid()}_{rank}.txt")
        train = partial(_train, arguments, environ=environ, folder=data)
        ranks.append(fork(train, output=outputs[-1]))
    try:
        wait_for(ranks, seconds=SECONDS_FOR_A_LEG)
    except RunError as error:
        ends = [output.read_text("utf-8", errors="replace")[-3000:] for output in outputs]
        raise RunError("\n".join([str(error), *ends])) from error


def _train(arguments: Sequence[str], *, environ: Mapping[str, str], folder: Path) -> None:
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv = ["torchtitan.train", *arguments]
    del sys.modules["torchtitan.train"]  # or runpy warns that it may be run twice
    runpy.run_module("torchtitan.train", run_name="__main__", alter_sys=True)


def fork(function: Callable[[], None], *, output: Path | None = None) -> int:
    """Call `function` in a fork and return its process id; `output` takes what the fork prints."""
    sys.stdout.flush()
    sys.stderr.flush()
    process = os.fork()
    if process:
        return process
    code = 1
    try:
        if output is not None:
            with output.open("wb") as file:
                os.dup2(file.fileno(), 1)
                os.dup2(file.fileno(), 2)
        function()
        code = 0
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else 1
    except BaseException:  # noqa: BLE001 - a fork must never return into its parent's code
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(processes: Sequence[int], *, seconds: float) -> None:
    """Wait until all forks have ended well.

    Raises:
        RunError: One failed or timed out; the remaining ones are killed.
    """
    running, deadline = set(processes), time.monotonic() + seconds
    try:
        while running:
            for process in list(running):
                ended, status = os.waitpid(process, os.WNOHANG)
                if ended:
                    running.remove(process)
                    if code := os.waitstatus_to_exitcode(status):
                        raise RunError(f"ended with exit code {code}")
            if time.monotonic() > deadline:
                raise RunError(f"did not end within {seconds:g} s")
            time.sleep(0.005)
    finally:
        for process in running:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
