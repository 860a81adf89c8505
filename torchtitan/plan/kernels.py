"""Seconds of a GPU's kernels by kind, from a chrome trace of the trainer's profiler.

Kernels are told apart by their names, those of NVIDIA's and AMD's libraries and of Triton; what no
word fits is other: norms, activation functions, copies, the optimizer.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from torchtitan.base.errors import ConfigError

DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
"""Categories of what a GPU does."""
WORDS: Mapping[str, re.Pattern[str]] = {
    "collectives": re.compile("nccl|rccl", re.IGNORECASE),
    "attention": re.compile("flash|fmha|attention|sdpa", re.IGNORECASE),
    "products": re.compile("gemm|cutlass|cublas|nvjet|^Cijk|_mm_", re.IGNORECASE),
}
"""In this order: attention is built of cutlass's parts too."""


def kind_of(kernel: str) -> str:
    """Return the kind of a kernel by its name."""
    return next((kind for kind, words in WORDS.items() if words.search(kernel)), "other")


def kernel_seconds(trace: Path, *, num_steps: int) -> Counter[str]:
    """Return the seconds of each kind per step; empty where there are no kernels.

    Raises:
        ConfigError: The trace is damaged.
    """
    spent: Counter[str] = Counter()
    try:
        for event in json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]:
            if event.get("ph") == "X" and event.get("cat") in DEVICE:
                kind = kind_of(event["name"]) if event["cat"] == "kernel" else "other"
                spent[kind] += event["dur"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{trace} must be a trace of torch's profiler, it cannot be read: {error!r}; profile "
            "the run again, or move the file away"
        ) from error
    return Counter({kind: time / 1e6 / num_steps for kind, time in spent.items()})
