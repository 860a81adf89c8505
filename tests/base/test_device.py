from __future__ import annotations

import pytest
import torch

from torchtitan.base.device import (
    peak_flops,
)
from torchtitan.base.peaks import GPU_PEAKS, table_peaks

CUDA = torch.device("cuda", 0)

# Multiprocessors (or compute units) x boost clock in MHz x dense bf16 FLOP a clock in each: from
# the architecture papers, not from the data sheets that the table was taken from.
UNITS = {
    "A10": (72, 1695, 1024),
    "A10G": (80, 1710, 512),
    "A30": (56, 1440, 2048),
    "A40": (84, 1740, 1024),
    "A100": (108, 1410, 2048),
    "RTX A6000": (84, 1800, 1024),
    "RTX 3090": (82, 1695, 512),
    "L4": (58, 2040, 1024),
    "L40": (142, 2490, 512),
    "L40S": (142, 2490, 1024),
    "RTX 6000 Ada": (142, 2505, 1024),
    "RTX 4090": (128, 2520, 512),
    "RTX 5090": (170, 2407, 512),
    "H100": (132, 1830, 4096),
    "H100 PCIe": (114, 1620, 4096),
    "H200": (132, 1830, 4096),
    "B200": (148, 1850, 8192),
    "MI250X": (110, 1700, 1024),
    "MI300X": (304, 2100, 2048),
    "MI325X": (304, 2100, 2048),
}


@pytest.mark.parametrize("name", UNITS)
def test_table_agrees_with_units_times_clock(name: str) -> None:
    units, megahertz, flop_per_clock = UNITS[name]
    assert GPU_PEAKS[name].bf16 == pytest.approx(
        units * megahertz * 1e6 * flop_per_clock / 1e12, rel=0.01
    )


@pytest.mark.parametrize(
    ("device", "row"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA H100 NVL", "H100 NVL"),
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
        ("AMD Instinct MI250X/MI250", "MI250X"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("NVIDIA T1000", None),
    ],
)
def test_device_names_find_their_row(device: str, row: str | None) -> None:
    assert table_peaks(device) is (GPU_PEAKS[row] if row else None)


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)


def test_gpu_peak_follows_dtype_and_matmul_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(monkeypatch, "NVIDIA H100 80GB HBM3")
    bf16 = peak_flops(CUDA, dtype=torch.bfloat16)
    assert bf16.value == pytest.approx(989.4e12)
    assert "NVIDIA H100 80GB HBM3" in bf16.source
    assert "bf16" in bf16.source
    assert peak_flops(CUDA, dtype=torch.float32).value == pytest.approx(67e12)
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: "high")
    tf32 = peak_flops(CUDA, dtype=torch.float32)
    assert tf32.value == pytest.approx(494.7e12)
    assert "tf32" in tf32.source
