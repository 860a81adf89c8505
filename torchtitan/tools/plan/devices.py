"""Peaks of devices and their links, from data sheets, and the shares of them that programs reach.

A plan gives bounds. Each resource has a share of its peak that good kernels and collectives reach
on large sizes, and a share for the worst case.

Sources: NVIDIA's data sheets of A100, H100, H200, B200 and L40S, AMD's of MI300X (memory,
bandwidth, links in one direction); matrix peaks are in `base/peaks.py`.
Memory is the size that the driver reports, slightly below the data sheet. Networks have the usual
adapter of 200 or 400 Gbit/s per GPU.
Shares: those of matrix products are fitted on nine measured jobs, three on A100, four on H100
(three of them in benchmarks/) and two on an H100 at 500 W. A single H100, with cuBLAS
at sizes from 4096, reaches 69 to 82 %, and less beside collectives. "H100-500W" is the H100 of
torchtitan's published figures: 96 GiB, 2.4 TB/s, 500 W of 700. H200 and B200 are taken to be like
H100; L40S and MI300X were not compared with jobs. Flash attention 2 reaches 42 to 58 % (51 to 60 %
were measured on an H100; the paper, arXiv:2307.08691, gives 50 to 73 % on A100, and
FlashAttention-3's, arXiv:2407.08608, 35 % forward on H100), memory-bound kernels 70 to 87 % of the
bandwidth (84 to 87 % were measured on large tensors), collectives 50 to 85 % of their links (NCCL's
tests call it bus bandwidth). A launch takes 6.2 to 6.4 us on an H100 without other ranks.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.base.peaks import GPU_PEAKS, table_peaks
from torchtitan.tools.plan.allocator import GIB


@dataclass(frozen=True, kw_only=True)
class Share:
    """Share of a resource's peak, or a rate or time, at worst and at best."""

    worst: float
    best: float


@dataclass(frozen=True, kw_only=True)
class Device:
    """One GPU and its links."""

    name: str
    memory: int
    """Bytes."""
    flops: float
    """Dense bfloat16 matrix products, FLOP/s."""
    bandwidth: float
    """Memory bandwidth, bytes/s."""
    link: float
    """Rate to GPUs of the same machine, one direction, bytes/s."""
    network: float
    """Rate to other machines, one direction, bytes/s per GPU."""
    products: Share = Share(worst=0.6, best=0.85)
    attention: Share = Share(worst=0.42, best=0.58)
    passes: Share = Share(worst=0.7, best=0.87)
    links: Share = Share(worst=0.5, best=0.85)
    latency: Share = Share(worst=30e-6, best=8e-6)
    """Latency of a collective or send, seconds."""
    launch: Share = Share(worst=10e-6, best=6e-6)
    """Time of the host per operator, seconds."""


A100_PRODUCTS = Share(worst=0.66, best=0.82)
H100_PRODUCTS = Share(worst=0.54, best=0.7)
LIMITED_PRODUCTS = Share(worst=0.41, best=0.54)
"""Shares in matrix products; the last of an H100 at 500 W of 700."""


def _device(
    name: str, gib: float, bandwidth: float, link: float, network: float, products: Share
) -> Device:
    """`bandwidth` in TB/s, `link` and `network` in GB/s."""
    return Device(
        name=name,
        memory=round(gib * GIB),
        flops=GPU_PEAKS[name.partition("-")[0]].bf16 * 1e12,
        bandwidth=bandwidth * 1e12,
        link=link * 1e9,
        network=network * 1e9,
        products=products,
    )


DEVICES: Mapping[str, Device] = {
    device.name: device
    for device in (
        _device("A100", 79.1, 2.039, 300, 25, A100_PRODUCTS),
        _device("H100", 79.1, 3.35, 450, 50, H100_PRODUCTS),
        _device("H100-500W", 94.5, 2.4, 450, 50, LIMITED_PRODUCTS),
        _device("H200", 139.8, 4.8, 450, 50, H100_PRODUCTS),
        _device("B200", 178.3, 7.7, 900, 50, H100_PRODUCTS),
        _device("L40S", 44.3, 0.864, 32, 25, Device.products),
        _device("MI300X", 191.9, 5.3, 448, 50, Device.products),
    )
}
MEASURED = ("products", "attention", "passes", "launch")
"""Shares that a calibration measures."""
ALLOWANCE = 2 * GIB
"""Memory of a device that torch does not allocate: the CUDA context and its libraries (about 0.5
GiB), NCCL's buffers of each communicator, cuBLAS's workspaces. A cautious estimate."""


def device_named(product: str) -> Device | None:
    """Return the device of the table by the product name that a driver reports, or None."""
    peaks = table_peaks(product)
    return next((DEVICES[n] for n in DEVICES if n in GPU_PEAKS and peaks is GPU_PEAKS[n]), None)


def find_device(name: str, *, memory_gib: float | None) -> Device:
    """Return a device of the table.

    `name` is a name of the table, a driver's product name, or a .json file of `scripts/benchmark.py
    gpu --calibrate`; `memory_gib` replaces the table's. Raises ConfigError if the name is unknown,
    or the file or a size is invalid.
    """
    if memory_gib is not None and not 0.0 < memory_gib < float("inf"):
        raise ConfigError(
            f"--memory_gib must be a finite number above 0, got {memory_gib:g}; write the size "
            "that the driver reports, or remove the option"
        )
    if name.endswith(".json"):
        device: Device | None = _read_constants(Path(name))
    else:
        device = DEVICES.get(name) or device_named(name)
    if device is None:
        raise ConfigError(
            f"--device must be one of {', '.join(DEVICES)}, got {name!r}"
            f"{did_you_mean(name, DEVICES)}; for another device use the nearest and --memory_gib, "
            "or a .json file of measured constants"
        )
    return device if memory_gib is None else replace(device, memory=round(memory_gib * GIB))


def _read_constants(file: Path) -> Device:
    try:
        table = json.loads(file.read_bytes())
        shares: dict[str, Any] = {name: Share(**table[name]) for name in MEASURED}
        memory = int(table["memory"])
        listed_device = device_named(table["product"])
        numbers = [memory, *(n for share in shares.values() for n in (share.worst, share.best))]
        if listed_device is None or not all(0.0 < number < float("inf") for number in numbers):
            raise ValueError("its device must be of the table, its figures finite and above 0")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--device {file} must be a file of `scripts/benchmark.py gpu --calibrate`: {error!r}"
        ) from error
    return replace(listed_device, memory=memory, **shares)
