"""The device of this process: its name, peak speed, memory, and small transfers.

Model FLOP/s utilization (MFU) needs the peak of the device. For GPUs it is the vendor's *dense*
figure; data sheets often print the one with sparsity, which is twice as high. CPUs and GPUs that
are missing in the table have no peak, and runs on them no MFU. A timed matrix product is no
substitute: measured on a busy machine, a CPU's peak was a quarter of the speed of training.

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
from torch import Tensor

from torchtitan.base.errors import ConfigError

GIB = 2**30


@dataclass(frozen=True, kw_only=True)
class PeakFlops:
    """Peak of a device in FLOP/s, and the source of the figure."""

    value: float
    source: str


@dataclass(frozen=True, kw_only=True)
class GpuPeaks:
    """Dense peaks in TFLOP/s: bf16 (fp32 accumulate) and TF32 matrix units, plain fp32."""

    bf16: float
    tf32: float
    fp32: float


# A key's words must all be in the device's name; the key with most words wins ("H100 PCIe" over
# "H100"). Sources: NVIDIA data sheets of each product (figures "with sparsity" halved) and the
# Ampere GA102, Ada and Blackwell RTX white papers; AMD Instinct data sheets (a device is one GCD of
# an MI250X). tests/base/test_device.py checks the bf16 column against units x clock.
GPU_PEAKS: Mapping[str, GpuPeaks] = {
    "A10": GpuPeaks(bf16=125.0, tf32=62.5, fp32=31.2),
    "A10G": GpuPeaks(bf16=70.0, tf32=35.0, fp32=35.0),
    "A30": GpuPeaks(bf16=165.0, tf32=82.0, fp32=10.3),
    "A40": GpuPeaks(bf16=149.7, tf32=74.8, fp32=37.4),
    "A100": GpuPeaks(bf16=312.0, tf32=156.0, fp32=19.5),
    "A800": GpuPeaks(bf16=312.0, tf32=156.0, fp32=19.5),
    "RTX A6000": GpuPeaks(bf16=154.8, tf32=77.4, fp32=38.7),
    "RTX 3090": GpuPeaks(bf16=71.0, tf32=35.6, fp32=35.6),
    "L4": GpuPeaks(bf16=121.0, tf32=60.0, fp32=30.3),
    "L40": GpuPeaks(bf16=181.0, tf32=90.5, fp32=90.5),
    "L40S": GpuPeaks(bf16=362.0, tf32=183.0, fp32=91.6),
    "RTX 6000 Ada": GpuPeaks(bf16=364.2, tf32=182.1, fp32=91.1),
    "RTX 4090": GpuPeaks(bf16=165.2, tf32=82.6, fp32=82.6),
    "RTX 5090": GpuPeaks(bf16=209.5, tf32=104.8, fp32=104.8),
    "H100": GpuPeaks(bf16=989.4, tf32=494.7, fp32=67.0),
    "H100 PCIe": GpuPeaks(bf16=756.0, tf32=378.0, fp32=51.0),
    "H100 NVL": GpuPeaks(bf16=835.5, tf32=417.5, fp32=60.0),
    "H800": GpuPeaks(bf16=989.4, tf32=494.7, fp32=67.0),
    "H200": GpuPeaks(bf16=989.4, tf32=494.7, fp32=67.0),
    "H200 NVL": GpuPeaks(bf16=835.5, tf32=417.5, fp32=60.0),
    "GH200": GpuPeaks(bf16=989.4, tf32=494.7, fp32=67.0),
    "B200": GpuPeaks(bf16=2250.0, tf32=1100.0, fp32=75.0),
    "GB200": GpuPeaks(bf16=2500.0, tf32=1250.0, fp32=80.0),
    "B300": GpuPeaks(bf16=2250.0, tf32=1125.0, fp32=75.0),
    "GB300": GpuPeaks(bf16=2500.0, tf32=1250.0, fp32=80.0),
    # torch uses no TF32 on AMD: fp32 matrix units in both columns
    "MI250X": GpuPeaks(bf16=191.5, tf32=47.9, fp32=47.9),
    "MI300X": GpuPeaks(bf16=1307.4, tf32=163.4, fp32=163.4),
    "MI325X": GpuPeaks(bf16=1307.4, tf32=163.4, fp32=163.4),
}
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16"})
"""Flags in /proc/cpuinfo of CPUs with bfloat16 units."""

# words of names of products that the table does not have
_OTHER_PRODUCT = frozenset({"Laptop", "MIG", "D", "Max", "Ti", "SUPER"})


def device_type() -> Literal["cuda", "cpu"]:
    """Return "cuda" if this machine has a GPU (NVIDIA, or AMD under ROCm), else "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def local_device(local_rank: int) -> torch.device:
    """Return the device of a local rank and make it the current device.

    Raises:
        ConfigError: The machine has fewer GPUs than processes.
    """
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
    return f"{_cpu_model()}, threads: {torch.get_num_threads()} (OMP_NUM_THREADS)"


def has_bfloat16(device_type: str) -> bool:
    """Return whether the device has bfloat16 units. Without them bfloat16 is emulated, which is
    slower than float32."""
    if device_type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    return torch.backends.mkldnn.is_available() and bool(BF16_FLAGS & _cpu_flags())


def peak_flops(device: torch.device, *, dtype: torch.dtype) -> PeakFlops | None:
    """Return the dense matrix-product peak of one GPU for operands of `dtype`; None if unknown.

    float32 means TF32 where `torch.set_float32_matmul_precision` allows it.
    """
    if device.type == "cpu" or dtype not in (torch.bfloat16, torch.float32):
        return None
    name = device_name(device)
    peaks = table_peaks(name)
    if peaks is None:
        return None
    column, teraflops = _column(peaks, dtype=dtype)
    return PeakFlops(value=teraflops * 1e12, source=f"data sheet of {name}, dense {column}")


def table_peaks(name: str) -> GpuPeaks | None:
    """Return the table's row for a device name, or None if it has none."""
    words = set(re.split(r"[\s/-]+", name))
    if words & _OTHER_PRODUCT:
        return None
    matches = [key for key in GPU_PEAKS if words.issuperset(key.split())]
    if not matches:
        return None
    return GPU_PEAKS[max(matches, key=lambda key: len(key.split()))]


def memory_peak_gib(device: torch.device) -> float:
    """Return the peak memory in GiB.

    GPU: of tensors, since the last `reset_memory_peak`. CPU: of this process, since its start.
    """
    if device.type == "cuda":
        return float(torch.cuda.memory_stats(device)["active_bytes.all.peak"]) / GIB
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak * (1 if sys.platform == "darwin" else 1024) / GIB


def find_out_of_memory(error: BaseException | None) -> torch.OutOfMemoryError | None:
    """Return the out-of-memory error that caused `error`, if any. A pipeline wraps errors."""
    while error is not None and not isinstance(error, torch.OutOfMemoryError):
        error = error.__cause__
    return error


def describe_out_of_memory(
    error: torch.OutOfMemoryError, argv: Sequence[str], *, environ: Mapping[str, str]
) -> str:
    """Return a message with the rank, torch's error, the peak, and a command that plans the job."""
    world_size = environ.get("WORLD_SIZE", "1")
    num_local = environ.get("LOCAL_WORLD_SIZE", world_size)
    command = ["python", "-m", "torchtitan.tools.plan", "memory", "--ran_out"]
    command += [f"--world_size={world_size}", f"--gpus_per_node={num_local}"]
    device = torch.device(device_type())
    if device.type == "cuda":
        memory_gib = torch.cuda.mem_get_info()[1] / GIB
        command += [f"--device={device_name(device)}", f"--memory_gib={memory_gib:.1f}"]
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        if not any("expandable_segments:True" in environ.get(name, "") for name in names):
            command.append("--classic_allocator")
    return (
        f"rank {environ.get('RANK', '0')} is out of memory: {error}\n"
        f"Its memory peaked at {memory_peak_gib(device):.2f} GiB. Run this to see what the memory "
        f"holds and which settings need less:\n{shlex.join([*command, *argv])}"
    )


def reset_memory_peak(device: torch.device) -> None:
    """Reset the peak that `memory_peak_gib` returns. A CPU's peak cannot be reset."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def _column(peaks: GpuPeaks, *, dtype: torch.dtype) -> tuple[str, float]:
    if dtype == torch.bfloat16:
        return "bf16", peaks.bf16
    if torch.get_float32_matmul_precision() == "highest":
        return "fp32", peaks.fp32
    return "tf32", peaks.tf32


def _cpu_model() -> str:
    return _cpu_info("model name") or platform.machine()


def _cpu_flags() -> set[str]:
    return set(_cpu_info("flags").split())


def _cpu_info(key: str) -> str:
    """Return the value of `key` for the first core in /proc/cpuinfo, or ""."""
    cpuinfo = Path("/proc/cpuinfo")
    text = cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.is_file() else ""
    match = re.search(rf"^{key}\s*:\s*(.+)$", text, flags=re.MULTILINE)
    return match.group(1).strip() if match else ""


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
