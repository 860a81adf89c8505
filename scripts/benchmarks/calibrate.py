"""The planner's constants of one GPU, as `torchtitan plan --device FILE` reads them.

    products   x W in bfloat16 for shapes of 1B to 8B models, as a share of the dense peak
    attention  causal attention of 8k tokens, forward, and forward with backward; share of the peak
    passes     adding two tensors of 256 MiB, and copying one; share of the memory bandwidth
    launch     seconds that the host needs to launch an operator

Each share has the smallest and the largest value. Links between GPUs are not measured.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

import torch
import torch.nn.functional as F

from torchtitan.base.device import device_name
from torchtitan.base.errors import ConfigError
from torchtitan.tools.plan.devices import DEVICES, Device, Share, device_named

SHAPES = ((8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
"""Rows, input width and output width."""
TOKENS, HEADS, HEAD_DIM = 8192, 32, 128
NUMEL = 2**27
"""Elements of a pass: 256 MiB of bfloat16."""
OPERATORS = 1000
SHRUNK = 64
"""Divides the toy's sizes."""
TIMES = 10


def write_constants(file: Path, *, device: torch.device, is_toy: bool) -> dict[str, object]:
    """Measure, and write the file.

    Args:
        is_toy: Use small sizes, also on a CPU, and take the device for an H100.

    Raises:
        ConfigError: The planner does not know the device.
    """
    product = "NVIDIA H100 (toy)" if is_toy else device_name(device)
    known = DEVICES["H100"] if is_toy else device_named(product)
    if known is None:
        raise ConfigError(f"--calibrate needs one of {', '.join(DEVICES)}, got {product}")
    shrunk = SHRUNK if is_toy else 1
    found: dict[str, object] = {
        "product": product,
        "memory": torch.cuda.mem_get_info()[1] if device.type == "cuda" else known.memory,
        "products": asdict(_products(known, device, shrunk=shrunk)),
        "attention": asdict(_attention(known, device, shrunk=shrunk)),
        "passes": asdict(_passes(known, device, shrunk=shrunk)),
        "launch": asdict(_launch(device)),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return found


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some work on an idle device."""
    times = []
    for _ in range(TIMES):
        _wait(device)
        started = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - started)
    return statistics.median(times[2:])


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _share(reached: Sequence[float]) -> Share:
    return Share(worst=min(reached), best=max(reached))


def _products(known: Device, device: torch.device, *, shrunk: int) -> Share:
    reached = []
    for shape in SHAPES:
        m, k, n = (size // shrunk for size in shape)
        x = torch.randn(m, k, dtype=torch.bfloat16, device=device)
        weight = torch.randn(n, k, dtype=torch.bfloat16, device=device)
        seconds = _seconds(lambda x=x, weight=weight: x @ weight.T, device)  # type: ignore[misc]
        reached.append(2 * m * n * k / seconds / known.flops)
    return _share(reached)


def _attention(known: Device, device: torch.device, *, shrunk: int) -> Share:
    tokens = TOKENS // shrunk
    q, k, v = (
        torch.randn(
            *(1, HEADS, tokens, HEAD_DIM), dtype=torch.bfloat16, device=device, requires_grad=True
        )
        for _ in range(3)
    )

    def forward() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    scores = HEADS * tokens * tokens * HEAD_DIM  # causal: half of each product's FLOPs
    once = 2 * scores / _seconds(forward, device)
    both = (2 + 5) * scores / _seconds(lambda: forward().sum().backward(), device)
    return _share([once / known.flops, both / known.flops])


def _passes(known: Device, device: torch.device, *, shrunk: int) -> Share:
    a, b, out = (
        torch.zeros(NUMEL // shrunk, dtype=torch.bfloat16, device=device) for _ in range(3)
    )
    size = a.nbytes
    reached = [
        3 * size / _seconds(lambda: torch.add(a, b, out=out), device),
        2 * size / _seconds(lambda: out.copy_(a), device),
    ]
    return _share([each / known.bandwidth for each in reached])


def _launch(device: torch.device) -> Share:
    x = torch.zeros(8, device=device)
    times = []
    for _ in range(TIMES):
        started = time.perf_counter()
        for _ in range(OPERATORS):
            x.add_(1)
        times.append((time.perf_counter() - started) / OPERATORS)
        _wait(device)
    return Share(worst=max(times[2:]), best=min(times))
