"""Peak speed of GPUs by product, from data sheets.

The figures are *dense*; data sheets often print those with sparsity, which are twice as high.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


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

# words of names of products that the table does not have
_OTHER_PRODUCT = frozenset({"Laptop", "MIG", "D", "Max", "Ti", "SUPER"})


def table_peaks(name: str) -> GpuPeaks | None:
    """Return the table's row for a device name, or None if it has none."""
    words = set(re.split(r"[\s/-]+", name))
    if words & _OTHER_PRODUCT:
        return None
    matches = [key for key in GPU_PEAKS if words.issuperset(key.split())]
    if not matches:
        return None
    return GPU_PEAKS[max(matches, key=lambda key: len(key.split()))]
