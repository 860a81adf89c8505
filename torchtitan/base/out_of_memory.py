"""Errors of a device that is out of memory: the message, with a command that plans the job."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from torchtitan.base.device import GIB, device_name, device_type, memory_peak_gib


def find_out_of_memory(error: BaseException | None) -> Exception | None:
    """Return the out-of-memory error that caused `error`, if any. A pipeline wraps errors."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return error
        # NCCL allocates its buffers by itself, and its error quotes CUDA's
        if isinstance(error, dist.DistBackendError) and "out of memory" in str(error):
            return error
        error = error.__cause__
    return None


def describe_out_of_memory(
    error: Exception, argv: Sequence[str], *, environ: Mapping[str, str]
) -> str:
    """Return a message with the rank, torch's error, the peak, and a command that plans the job."""
    world_size = environ.get("WORLD_SIZE", "1")
    num_local = environ.get("LOCAL_WORLD_SIZE", world_size)
    command = ["python", "-m", "torchtitan", "plan", "memory", "--ran_out"]
    command += [f"--world_size={world_size}", f"--gpus_per_node={num_local}"]
    device = torch.device(device_type())
    if device.type == "cuda":
        memory_gib = torch.cuda.mem_get_info()[1] / GIB
        command += [f"--device={device_name(device)}", f"--memory_gib={memory_gib:.1f}"]
    return (
        f"rank {environ.get('RANK', '0')} is out of memory: {error}\n"
        f"Its memory peaked at {memory_peak_gib(device):.2f} GiB. Run this to see what the memory "
        f"holds and which settings need less:\n{shlex.join([*command, *argv])}"
    )
