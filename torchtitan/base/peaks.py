"""Peak speed of GPUs by product, from data sheets.

The figures are *dense*; data sheets often print those with sparsity, which are twice as high.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import NamedTuple


class GpuPeaks(NamedTuple):
    """Dense peaks in TFLOP/s: bf16 (fp32 accumulate) and TF32 matrix units, plain fp32."""

    bf16: float
    tf32: float
    fp32: float


# A key's words must all be in the device's name; the key with most words wins ("H100 PCIe" over
# "H100"). Sources: NVIDIA data sheets of each product (figures "with sparsity" halved) and the
# Ampere GA102, Ada and Blackwell RTX white papers; AMD Instinct data sheets (a device is one GCD of
# an MI250X). tests/base/test_device.py checks the bf16 column against units x clock.
GPU_PEAKS: Mapping[str, GpuPeaks] = {
    "A10": GpuPeaks(125.0, 62.5, 31.2),
    "A10G": GpuPeaks(70.0, 35.0, 35.0),
    "A30": GpuPeaks(165.0, 82.0, 10.3),
    "A40": GpuPeaks(149.7, 74.8, 37.4),
    "A100": GpuPeaks(312.0, 156.0, 19.5),
    "A800": GpuPeaks(312.0, 156.0, 19.5),
    "RTX A6000": GpuPeaks(154.8, 77.4, 38.7),
    "RTX 3090": GpuPeaks(71.0, 35.6, 35.6),
    "L4": GpuPeaks(121.0, 60.0, 30.3),
    "L40": GpuPeaks(181.0, 90.5, 90.5),
    "L40S": GpuPeaks(362.0, 183.0, 91.6),
    "RTX 6000 Ada": GpuPeaks(364.2, 182.1, 91.1),
    "RTX 4090": GpuPeaks(165.2, 82.6, 82.6),
    "RTX 5090": GpuPeaks(209.5, 104.8, 104.8),
    "H100": GpuPeaks(989.4, 494.7, 67.0),
    "H100 PCIe": GpuPeaks(756.0, 378.0, 51.0),
    "H100 NVL": GpuPeaks(835.5, 417.5, 60.0),
    "H800": GpuPeaks(989.4, 494.7, 67.0),
    "H200": GpuPeaks(989.4, 494.7, 67.0),
    "H200 NVL": GpuPeaks(835.5, 417.5, 60.0),
    "GH200": GpuPeaks(989.4, 494.7, 67.0),
    "B200": GpuPeaks(2250.0, 1100.0, 75.0),
    "GB200": GpuPeaks(2500.0, 1250.0, 80.0),
    "B300": GpuPeaks(2250.0, 1125.0, 75.0),
    "GB300": GpuPeaks(2500.0, 1250.0, 80.0),
    # torch uses no TF32 on AMD: fp32 matrix units in both columns
    "MI250X": GpuPeaks(191.5, 47.9, 47.9),
    "MI300X": GpuPeaks(1307.4, 163.4, 163.4),
    "MI325X": GpuPeaks(1307.4, 163.4, 163.4),
}
OTHER_PRODUCT = frozenset({"Laptop", "MIG", "D", "Max", "Ti", "SUPER"})
"""Words of names of products that the table does not have."""


def table_peaks(name: str) -> GpuPeaks | None:
    """Return the table's row for a device name, or None if it has none."""
    words = set(re.split(r"[\s/-]+", name))
    matches = [key for key in GPU_PEAKS if words.issuperset(key.split())]
    if not matches or words & OTHER_PRODUCT:
        return None
    return GPU_PEAKS[max(matches, key=lambda key: len(key.split()))]
