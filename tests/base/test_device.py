from __future__ import annotations

import shlex
import subprocess
from pathlib import Path

import pytest
import torch
from torch.distributed import DistBackendError

from tests.naming import naming
from torchtitan.base import device as device_module
from torchtitan.base.device import (
    GIB,
    describe_out_of_memory,
    device_type,
    find_out_of_memory,
    has_bfloat16,
    local_device,
    peak_flops,
)
from torchtitan.base.errors import ConfigError
from torchtitan.base.peaks import GPU_PEAKS, table_peaks

CPU = torch.device("cpu")
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


def test_columns_are_in_proportion() -> None:
    for name, peaks in GPU_PEAKS.items():
        assert peaks.fp32 <= peaks.tf32 < peaks.bf16, name
        if not name.startswith("MI"):
            assert peaks.tf32 == pytest.approx(peaks.bf16 / 2, rel=0.03), name


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


def test_other_devices_have_no_peak(monkeypatch: pytest.MonkeyPatch) -> None:
    _pretend_gpu(monkeypatch, "NVIDIA Z9000")
    assert peak_flops(CUDA, dtype=torch.bfloat16) is None
    assert peak_flops(CPU, dtype=torch.float32) is None


@pytest.mark.slow
def test_memory_peak_sees_an_allocation(warm_python: Path) -> None:
    """In a process of its own: a peak never falls, and other tests have theirs."""
    code = (
        "import torch\n"
        "from torchtitan.base.device import memory_peak_gib\n"
        "before = memory_peak_gib(torch.device('cpu'))\n"
        "torch.ones(3 * 2**26)\n"  # 0.75 GiB of float32
        "print(before, memory_peak_gib(torch.device('cpu')))\n"
    )
    done = subprocess.run([warm_python, "-c", code], capture_output=True, text=True, check=True)
    before, after = map(float, done.stdout.split())
    assert 0.05 < before < 0.7
    assert 0.75 < after < before + 0.8


def test_local_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_type() == "cpu"
    assert local_device(3) == CPU
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert device_type() == "cuda"
    assert local_device(1) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    with pytest.raises(ConfigError, match=naming(2, "NGPU=2")):
        local_device(2)


@pytest.mark.parametrize(
    ("flags", "has"),
    [
        ("fpu sse2 avx512f amx_bf16", True),
        ("avx512_bf16", True),
        ("avx512f avx512_bf16_like amx_int8", False),
        ("", False),
    ],
)
def test_a_cpu_says_whether_it_multiplies_bfloat16(
    flags: str, has: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_module, "_cpu_info", lambda key: flags if key == "flags" else "x")
    assert has_bfloat16("cpu") is has
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    assert has_bfloat16("cpu") is False


def test_torch_sees_the_same_cpu() -> None:
    if not hasattr(torch.cpu, "get_capabilities"):
        pytest.skip("this torch does not tell what the CPU can do")
    told = torch.cpu.get_capabilities()
    expected = bool(told.get("avx512_bf16") or told.get("amx_bf16"))
    assert has_bfloat16("cpu") is (expected and torch.backends.mkldnn.is_available())


def test_the_cause_of_an_error_is_found() -> None:
    """A pipeline raises its own error from that of a stage."""
    cause = torch.OutOfMemoryError("full")
    wrapped = RuntimeError("stage 1 failed")
    wrapped.__cause__ = cause
    assert find_out_of_memory(cause) is find_out_of_memory(wrapped) is cause
    nccl = DistBackendError("NCCL error ...\nCuda failure 2 'out of memory'")
    assert find_out_of_memory(nccl) is nccl
    for other in (RuntimeError("other"), DistBackendError("NCCL error ... remote process exited")):
        assert find_out_of_memory(other) is None


def test_a_gpu_out_of_memory_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "is_available": lambda: True,
        "mem_get_info": lambda: (0, round(79.1 * GIB)),
        "get_device_name": lambda _: "NVIDIA H100 80GB HBM3",
        "memory_stats": lambda _: {"active_bytes.all.peak": 77 * GIB},
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    environ = {"RANK": "3", "WORLD_SIZE": "16", "LOCAL_WORLD_SIZE": "8"}
    said = describe_out_of_memory(
        torch.OutOfMemoryError("full"), ["--job.config_file", "my job.toml"], environ=environ
    )
    first, peak, command = said.splitlines()
    assert first == "rank 3 is out of memory: full"
    assert "77.00 GiB" in peak
    assert shlex.split(command) == [
        *("python", "-m", "torchtitan", "plan", "memory", "--ran_out"),
        *("--world_size=16", "--gpus_per_node=8"),
        *("--device=NVIDIA H100 80GB HBM3", "--memory_gib=79.1"),
        *("--job.config_file", "my job.toml"),
    ]
