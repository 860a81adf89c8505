"""What a run that is out of memory says: the plan of its own job, and the nearest settings.

The planner runs in a process of its own: this one has a process group, and a device that is full.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence

import torch

from torchtitan.base.device import GIB
from torchtitan.plan.devices import DEVICES, device_named

SECONDS_TO_PLAN = 90
"""Less than the timeout of collectives, in which other ranks may hang by now."""


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


def plan_after(argv: Sequence[str], *, world_size: int) -> str:
    """Return what the planner says of a run on devices as this process has one."""
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else "a CPU"
    said = [os.environ.get(name, "") for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")]
    command = planning_command(
        argv,
        world_size=world_size,
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", world_size)),
        device=device,
        memory=torch.cuda.mem_get_info()[1] if on_gpu else None,
        expandable="expandable_segments:True" in "".join(said),
    )
    lines = [f"What the plan of this job says, by python {shlex.join(command)}"]
    if device_named(device) is None:
        lines.append(f"(the planner has no figures of {device}, so it takes an H100's)")
    return "\n".join([*lines, "", _run(command)])


def _run(command: Sequence[str]) -> str:
    environ = {key: value for key, value in os.environ.items() if not _is_of_launcher(key)}
    try:
        done = subprocess.run(
            [sys.executable, *command],
            env={**environ, "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
            timeout=SECONDS_TO_PLAN,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return f"The planner has not finished in {SECONDS_TO_PLAN} s: run it by hand."
    return done.stdout or done.stderr


def _is_of_launcher(key: str) -> bool:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return key in names or key.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))
