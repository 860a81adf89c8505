"""What a run that is out of memory says: the plan of its own job, and the nearest settings.

The planner runs in a process of its own: this one has a process group, and a device that is full.
What it says is passed on as it comes, the account within seconds. To search for settings may take
minutes, and other ranks do not wait so long: they may stand in a collective, and when its timeout
ends one of them, the launcher ends all. So the search has a time limit below that timeout, and who
wants to wait longer is told the command.
"""

from __future__ import annotations

import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TextIO

import torch

from torchtitan.base.device import GIB
from torchtitan.base.errors import UserError
from torchtitan.config.layers import literal
from torchtitan.job import load_config
from torchtitan.optim.settings import OptimizerConfig
from torchtitan.plan.devices import DEVICES, device_named

SECONDS_TO_PLAN = 90
"""The most that a run which has failed is held up for."""
SECONDS_BEFORE_TIMEOUT = 15
"""How long before the other ranks' timeout the planner has to be through. They count from when they
entered a collective, maybe seconds before this rank ran out of memory; and ending the planner takes
SECONDS_TO_END, and the report has to be printed."""
SECONDS_TO_END = 3
"""What the planner gets to end its own processes, before it is killed."""
SECONDS_TO_LOOK = 0.1
"""How often this process looks whether the planner has said something."""


def seconds_to_plan(timeout: float | None) -> float:
    """Return how long the planner may take.

    `timeout`: of the other ranks' collectives, seconds; a short one is halved. None: nobody waits.
    """
    if timeout is None:
        return SECONDS_TO_PLAN
    return min(SECONDS_TO_PLAN, max(timeout - SECONDS_BEFORE_TIMEOUT, timeout / 2))


def find_cause(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Return the lack of memory that led to an error: a pipeline raises errors of its own."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def planning_command(
    argv: Sequence[str],
    *,
    world_size: int,
    gpus_per_node: int,
    device: str,
    memory: int | None,
    expandable: bool,
) -> list[str]:
    """Return the command that tells where the memory of a run goes.

    `argv`: the run's settings; `device`: its product name; `memory`: its bytes, if they are known.
    """
    found = device_named(device)
    command = [
        *("-m", "torchtitan.plan", "memory", "--ran_out"),
        f"--world_size={world_size}",
        f"--gpus_per_node={gpus_per_node}",
        f"--device={(found or DEVICES['H100']).name}",
    ]
    if memory is not None:
        command.append(f"--memory_gib={memory / GIB:.1f}")
    if not expandable:
        command.append("--classic_allocator")
    return [*command, *argv]


def plan_after(argv: Sequence[str], *, world_size: int, seconds: float) -> Iterator[str]:
    """Yield what the planner says of a run on devices as this process has one, as it comes.

    `seconds`: the most that the planner may take.
    """
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "a CPU"
    said = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    instead = instead_of_muon(argv)
    command = planning_command(
        [*argv, *instead],
        world_size=world_size,
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device=device,
        memory=torch.cuda.mem_get_info()[1] if on_gpu else None,
        expandable="expandable_segments:True" in "".join(said),
    )
    lines = [f"What the plan of this job says, by python {shlex.join(command)}"]
    if device_named(device) is None:
        lines.append(f"(the planner has no figures of {device}, so it takes an H100's)")
    if instead:
        lines.append("(it cannot rehearse Muon, so it takes AdamW, which needs more memory)")
    yield "\n".join([*lines, ""])
    yield from _run(command, seconds=seconds)


def instead_of_muon(argv: Sequence[str]) -> list[str]:
    """Return options that put AdamW in Muon's place; none where the optimizer is another."""
    logging.disable(logging.WARNING)  # the start has given these notices
    try:
        optimizer = load_config(argv).optimizer
    except UserError:  # a file has changed since: the planner, which reads it too, says so
        return []
    finally:
        logging.disable(logging.NOTSET)
    if optimizer.name != "Muon":
        return []
    default = OptimizerConfig()
    options = ["--optimizer.name=AdamW"]
    for name in [field.name for field in fields(default) if field.name.startswith("muon_")]:
        usual = getattr(default, name)
        if getattr(optimizer, name) != usual:  # AdamW takes none of them
            options.append(f"--optimizer.{name}={literal(usual)}")
    return options


@dataclass(frozen=True, kw_only=True)
class _Planner:
    """A planner that runs, and the files that it writes to: whoever reads a pipe would also wait
    for the planner's own processes, which hold it too."""

    process: subprocess.Popen[bytes]
    out: TextIO
    errors: TextIO

    def lines(self, *, until: float) -> Iterator[str]:
        """Yield what it says, in whole lines, until it ends or it is that late."""
        rest = ""
        is_last = False
        while not is_last:
            # before reading, so that nothing comes later
            is_last = self.process.poll() is not None or time.monotonic() >= until
            lines, newline, rest = (rest + self.out.read()).rpartition("\n")
            if newline:
                yield lines
            if not is_last:
                time.sleep(SECONDS_TO_LOOK)


def _run(command: Sequence[str], *, seconds: float) -> Iterator[str]:
    """Yield what a planner says, and how it ended if not by itself."""
    has_account = False
    with _started(command) as planner:
        for lines in planner.lines(until=time.monotonic() + seconds):
            yield lines
            has_account = True
        code, errors = planner.process.poll(), planner.errors.read()
    leisurely = f"to run it at leisure: python {shlex.join(command)}"
    if code is None and has_account:
        yield f"\nThe search for settings was ended after {seconds:.0f} s; {leisurely}"
    elif code is None:
        yield f"The planner was ended after {seconds:.0f} s, with no account yet; {leisurely}"
    elif code < 0:
        yield f"The planner was ended by signal {-code}; {leisurely}"
    elif code > 0:
        yield errors


@contextmanager
def _started(command: Sequence[str]) -> Iterator[_Planner]:
    """Start a planner, and end it."""
    environ = {key: value for key, value in os.environ.items() if not _is_of_launcher(key)}
    with tempfile.TemporaryDirectory() as folder:
        out, errors = Path(folder) / "out", Path(folder) / "errors"
        with out.open("wb") as stdout, errors.open("wb") as stderr:
            process = subprocess.Popen(
                [sys.executable, *command],
                env={**environ, "CUDA_VISIBLE_DEVICES": ""},
                stdout=stdout,
                stderr=stderr,
            )
        try:
            with out.open() as reads_out, errors.open() as reads_errors:
                yield _Planner(process=process, out=reads_out, errors=reads_errors)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a planner that is still at it, and its own processes, which would outlive a kill."""
    if process.poll() is not None:
        return
    process.send_signal(signal.SIGINT)
    try:
        process.wait(SECONDS_TO_END)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _is_of_launcher(key: str) -> bool:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return key in names or key.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
