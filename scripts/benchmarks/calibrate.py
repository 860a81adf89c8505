"""The planner's constants of one GPU: how much of its peaks kernels reach, and what the host needs.

    products   x W in bfloat16 for shapes of 1B to 8B models; share of the dense peak
    attention  causal attention of 8k tokens, forward, and forward with backward; share of it
    passes     reading two tensors of 256 MiB and writing a third, and copying one; share of the
               memory's bandwidth
    copies     from page-locked memory to the device, and back; share of the link's bandwidth
    launch     seconds of the host for an operator on 8 numbers
    on_host    bytes/s of fused AdamW in the host's memory

Of several the least and the largest are the bounds. Links between GPUs stay those of the table: one
GPU cannot tell.
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
from torchtitan.tools.plan.devices import DEVICES, Constants, Device, Share, device_named

SHAPES = ((8192, 2048, 8192), (8192, 4096, 4096), (8192, 4096, 14336), (8192, 14336, 4096))
"""Rows, input and output width."""
TOKENS, HEADS, HEAD_DIM = 8192, 32, 128
NUMEL = 2**27
"""Of a pass: 256 MiB of bfloat16."""
OPTIMIZED, OPERATORS = 2**24, 1000
SHRUNK = 64
"""The toy's sizes are smaller by so much."""
TIMES = 10


def write_constants(file: Path, *, device: torch.device, is_toy: bool) -> Constants:
    """Measure, and write what `--device FILE` of the planner reads.

    `is_toy`: small sizes, on a CPU too, which is measured as if it were an H100: to try it.

    Raises:
        ConfigError: The planner does not know the device.
    """
    product = "NVIDIA H100 (toy)" if is_toy else device_name(device)
    known = DEVICES["H100"] if is_toy else device_named(product)
    if known is None:
        raise ConfigError(
            f"--calibrate measures one of {', '.join(DEVICES)}, got {product}; plan with the "
            "nearest of them"
        )
    shrunk = SHRUNK if is_toy else 1
    found = Constants(
        product=product,
        memory=torch.cuda.mem_get_info()[1] if device.type == "cuda" else known.memory,
        products=_products(known, device, shrunk=shrunk),
        attention=_attention(known, device, shrunk=shrunk),
        passes=_passes(known, device, shrunk=shrunk),
        copies=_copies(known, device, shrunk=shrunk),
        launch=_launch(device),
        on_host=_on_host(shrunk=shrunk),
    )
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(asdict(found), indent=1) + "\n", encoding="utf-8")
    return found


def _seconds(work: Callable[[], object], device: torch.device) -> float:
    """Return the median time of some work on an idle device."""
    times = []
    for _ in range(TIMES):
        _wait(device)
        begun = time.perf_counter()
        work()
        _wait(device)
        times.append(time.perf_counter() - begun)
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

    scores = HEADS * tokens * tokens * HEAD_DIM  # half of each product's: causal
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
        begun = time.perf_counter()
        for _ in range(OPERATORS):
            x.add_(1)
        times.append((time.perf_counter() - begun) / OPERATORS)
        _wait(device)
    return Share(worst=max(times[2:]), best=min(times))


def _on_host(*, shrunk: int) -> Share:
    weight = torch.zeros(OPTIMIZED // shrunk, requires_grad=True)
    weight.grad = torch.ones_like(weight)
    optimizer = torch.optim.AdamW([weight], fused=True)
    moved = 7 * weight.nbytes  # reads the gradient; reads and writes the weight and both states
    reached = []
    threads = torch.get_num_threads()
    for num in {1, threads}:
        torch.set_num_threads(num)
        reached.append(moved / _seconds(optimizer.step, torch.device("cpu")))
    torch.set_num_threads(threads)
    return _share(reached)


def _copies(known: Device, device: torch.device, *, shrunk: int) -> Share:
    pinned = torch.zeros(NUMEL // shrunk, pin_memory=device.type == "cuda")
    on_device = torch.zeros(NUMEL // shrunk, device=device)
    reached = [
        pinned.nbytes / _seconds(lambda: on_device.copy_(pinned), device),
        pinned.nbytes / _seconds(lambda: pinned.copy_(on_device), device),
    ]
    return _share([each / known.to_host for each in reached])
