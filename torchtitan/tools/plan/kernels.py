"""Seconds of a GPU's kernels by kind, from a chrome trace of the trainer's profiler.

Kinds are read from the names of kernels in NVIDIA's and AMD's libraries. Norms, activation
functions, copies within the device and the optimizer are `other`. Kernels that torch's compiler
wrote in Triton are a separate kind, because their names list fused operators of any kind.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.files import read_text

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of a GPU's events in a trace."""
WORDS: Mapping[str, re.Pattern[str]] = {
    "compiled": re.compile("^triton_"),
    "collectives": re.compile("nccl|rccl", re.IGNORECASE),
    "attention": re.compile("flash|fmha|attention|sdpa", re.IGNORECASE),
    "products": re.compile("gemm|cutlass|cublas|nvjet|^Cijk|_mm_", re.IGNORECASE),
}
"""Checked in this order, because attention kernels contain parts of cutlass."""
COPIES: Mapping[str, re.Pattern[str]] = {
    "to device": re.compile("HtoD"),
    "to host": re.compile("DtoH"),
}
"""Copies between a device and its host."""


def kind_of(name: str, *, category: str = "kernel") -> str:
    """Return the kind of a GPU's event by its name."""
    kinds = WORDS if category == "kernel" else COPIES
    return next((kind for kind, words in kinds.items() if words.search(name)), "other")


def kernel_seconds(trace: Path, *, num_steps: int) -> Counter[str]:
    """Return the seconds of each kind per step, empty for a trace without kernels.

    Raises:
        ConfigError: The trace cannot be read.
    """
    spent: Counter[str] = Counter()
    try:
        for event in json.loads(read_text(trace))["traceEvents"]:
            if event.get("ph") == "X" and event.get("cat") in DEVICE:
                spent[kind_of(event["name"], category=event["cat"])] += event["dur"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{trace} must be a trace of torch's profiler and cannot be read: {error!r}; profile "
            "the run again, or remove the file"
        ) from error
    return Counter({kind: time / 1e6 / num_steps for kind, time in spent.items()})
