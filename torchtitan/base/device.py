"""The device of this process: its name, peak speed, memory, and small transfers.

Model FLOP/s utilization (MFU) needs the peak of the device. CPUs, and GPUs that `peaks.py` lacks,
have no peak, and runs on them no MFU. A timed matrix product is no substitute: on a busy machine a
CPU's peak was a quarter of the speed of training.

`tensor.item()` makes the host wait until the device has finished all queued work, and then the
device waits for the host. `HostCopy` queues a copy into page-locked memory instead, which is read
later.
"""

from __future__ import annotations

import platform
import re
import resource
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import ConfigError

GIB = 2**30
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags in /proc/cpuinfo of CPUs with bfloat16 units."""


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """Peak of a device in FLOP/s, and the source of the figure."""

    value: float
    source: str


def device_type() -> Literal["cuda", "cpu"]:
    """Return "cuda" if this machine has a GPU (NVIDIA, or AMD under ROCm), else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(local_rank: int) -> torch.device:
    """Return the device of a local rank and make it the current device; raise ConfigError if the
    machine has fewer GPUs than processes."""
    if device_type() == "cpu":
        return torch.device("cpu")
    num_gpus = torch.cuda.device_count()
    if local_rank >= num_gpus:
        raise ConfigError(
            f"each process needs its own GPU, got local rank {local_rank} on a machine with "
            f"{num_gpus} GPUs; start at most {num_gpus} processes there (NGPU={num_gpus})"
        )
    device = torch.device("cuda", local_rank)
    torch.cuda.set_device(device)
    return device


def device_name(device: torch.device) -> str:
    """Return the product name of the device, for a CPU with the number of threads."""
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    model = _cpu_info("model name") or platform.machine()
    return f"{model}, threads: {torch.get_num_threads()} (OMP_NUM_THREADS)"


def has_bfloat16(device_type: str) -> bool:
    """Return whether the device has bfloat16 units. Without them bfloat16 is emulated, which is
    slower than float32."""
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.backends.mkldnn.is_available() and bool(BF16_FLAGS & {*_cpu_info("flags").split()})


def peak_flops(device: torch.device, *, dtype: torch.dtype) -> PeakFlops | None:
    """Return the dense matrix-product peak of one GPU for operands of `dtype`; None if unknown.

    float32 means TF32 where `torch.set_float32_matmul_precision` allows it.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    from torchtitan.base.peaks import table_peaks

    name = device_name(device)
    if (peaks := table_peaks(name)) is None:
        return None
    is_tf32 = torch.get_float32_matmul_precision() != "highest"
    column = "bf16" if dtype == torch.bfloat16 else "tf32" if is_tf32 else "fp32"
    teraflops = peaks._asdict()[column]
    return PeakFlops(value=teraflops * 1e12, source=f"data sheet of {name}, dense {column}")


def memory_peak_gib(device: torch.device) -> float:
    """Return the peak memory in GiB.

    GPU: of tensors, since the last `reset_memory_peak`. CPU: of this process, since its start.
    """
    if device.type == "cuda":
        return float(torch.cuda.memory_stats(device)["active_bytes.all.peak"]) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def reset_memory_peak(device: torch.device) -> None:
    """Reset the peak that `memory_peak_gib` returns. A CPU's peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _cpu_info(key: str) -> str:
    """Return the value of `key` for the first core in /proc/cpuinfo, or ""."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    match = re.search(rf"^{key}\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match.group(1).strip() if match else ""


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
    command = ["python", "-m", "torchtitan", "plan", "memory"]
    command += [f"--world_size={world_size}", f"--gpus_per_node={num_local}"]
    device = torch.device(device_type())
    if device.type == "cuda":
        memory_gib = torch.cuda.mem_get_info()[1] / GIB
        command += [f"--device={device_name(device)}", f"--memory_gib={memory_gib:.1f}"]
    return (
        f"rank {environ.get('RANK', '0')} is out of memory: {error}\n"
        f"Its memory peaked at {memory_peak_gib(device):.2f} GiB. Run this to see what the memory "
        f"holds, and `plan layout` for layouts that need less:\n{shlex.join([*command, *argv])}"
    )


class HostCopy:
    """Asynchronous copy of numbers to the host."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = values.clone()

    def read(self) -> list[float]:
        """Wait for the copy and return the numbers."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Copy integers to a device, as int64, without waiting."""
    pinned = torch.tensor(values, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
