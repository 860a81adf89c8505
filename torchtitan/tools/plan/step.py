"""Bounds of the time of a step, from a rank's arithmetic, memory traffic, messages and launches.

Each resource has a time at worst and at best, from the shares of its peak in `devices.py`:

    products    matrix products, by shape: sides are rounded up to tiles of 128
    attention   causal attention, half of the scores
    passes      all other operators: bytes read and written
    waits       collectives that computation waits for: tp, cp, ep
    overlapped  collectives beside computation: gathered weights, reduced gradients
    to device   copies of offloaded weights before they are gathered; unsharded, computation waits
    to host     copies of their gradients
    offload     work of the host on offloaded weights: the update, sums of gradients
    host        launches of operators, one after the other, beside the device's work

A microbatch's forward takes products, attention, passes and waits in turn. A pipeline's
microbatches are simulated with its table (`schedule.py`), which adds the bubble. At best, all that
can overlap does. At worst a third of the overlapped collectives does not, nor do copies.

The bounds do not cover badly chosen kernels, throttled clocks or a shared network. The compiler
fuses an unknown part of the passes, so half of their bytes count at best, all at worst.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from torchtitan.tools.plan.devices import Device, Share
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.links import OVERLAPPED, Axis, axes_of, collective
from torchtitan.tools.plan.ranks import rehearse_ranks
from torchtitan.tools.plan.schedule import Costs, simulate
from torchtitan.tools.plan.tape import Entry, Phase, Record

TILE = 128
EXPOSED = 0.35
"""Share of the shorter of computation and overlapped collectives that the longer one does not hide
at worst, fitted with the shares of `devices.py`."""
FUSED = 1 / 2
"""Share of the bytes of passes that remains at best if blocks are compiled."""
Time = tuple[float, float]
"""Seconds at worst, and at best."""
NONE: Time = (0.0, 0.0)
IN_TURN = ("products", "attention", "passes", "waits", "offload")
BESIDE = ("overlapped", "to device", "to host")


@dataclass(frozen=True, kw_only=True)
class StepTime:
    """Bounds of one optimizer step."""

    worst: float
    best: float
    """Seconds."""
    resources: Mapping[str, Time]
    """Time of each resource on the rank that needs it most, and of the bubble."""
    tokens_per_second: Time
    """Tokens/s of all ranks, at worst and at best."""
    mfu: Time
    """Percent of the device's dense bfloat16 peak."""

    @property
    def binds(self) -> str:
        """The resource with the longest time at best."""
        return max(self.resources, key=lambda name: self.resources[name][1])


def time_step(planned: Planned, records: Sequence[Record]) -> StepTime:
    """Return the bounds of a step from the records of the pipeline's ranks."""
    ranks = [RankTimes(record, planned) for record in records]
    (worst, worst_idle), (best, best_idle) = (_whole_step(planned, ranks, n) for n in (0, 1))
    resources = {
        name: max((rank.total(name) for rank in ranks), key=lambda t: (t[1], t[0]))
        for name in (*IN_TURN, *BESIDE, "host")
    }
    resources["bubble"] = (worst_idle, best_idle)
    tokens, flops = planned.tokens_per_step, planned.model_flops
    peak = planned.device.flops * planned.world_size
    return StepTime(
        worst=worst,
        best=best,
        resources=resources,
        tokens_per_second=(tokens / worst, tokens / best),
        mfu=(100 * flops / worst / peak, 100 * flops / best / peak),
    )


class RankTimes:
    """The times of one rank, by phase and resource."""

    def __init__(self, record: Record, planned: Planned) -> None:
        device = planned.device
        axes = axes_of(planned.layout.dims, gpus_per_node=planned.gpus_per_node)
        kept = FUSED if planned.config.compile.enable else 1.0
        self._times: defaultdict[tuple[str, str, int], float] = defaultdict(float)
        """Seconds by phase, resource and bound (0 worst, 1 best)."""
        cached: dict[tuple[object, ...], tuple[str, Time]] = {}
        offloads = planned.config.training.enable_cpu_offload
        launch = (device.launch.worst, device.launch.best)
        for piece, end in record.bounds():
            phase = piece.phase or "between"
            for entry in record.entries[piece.start : end]:
                if entry.event in ("birth", "death"):
                    continue
                is_on_host = entry.pool == "host" or (offloads and phase == "update")
                key = (*entry[:3], is_on_host)
                if key not in cached:
                    cached[key] = _time(
                        entry, device=device, axes=axes, kept=kept, is_on_host=is_on_host
                    )
                resource, time = cached[key]
                times = _times(planned, entry, piece.phase)
                for bound in (0, 1):
                    self._times[phase, resource, bound] += times * time[bound]
                    self._times[phase, "host", bound] += times * launch[bound]
        # unsharded weights are copied when they are used, not gathered ahead
        is_waited_for = planned.layout.dims.fsdp == 1
        self._in_turn = (*IN_TURN, "to device") if is_waited_for else IN_TURN
        self._beside = [name for name in BESIDE if name not in self._in_turn]

    def total(self, resource: str) -> Time:
        """Return the time of a resource over the step."""
        return self.of(resource, 0), self.of(resource, 1)

    def of(self, resource: str, bound: int, *phases: str) -> float:
        """Return the time of a resource in the given phases, or in all."""
        return sum(
            time
            for (phase, name, which), time in self._times.items()
            if name == resource and which == bound and (not phases or phase in phases)
        )

    def in_turn(self, bound: int, *phases: str) -> float:
        """Return the time that the device computes and waits, or the host launches, if longer."""
        device = sum(self.of(resource, bound, *phases) for resource in self._in_turn)
        return max(device, self.of("host", bound, *phases))

    def beside(self, bound: int) -> float:
        """Return the time of links beside computation. At best they all work at once."""
        times = [self.of(resource, bound) for resource in self._beside]
        return sum(times) if bound == 0 else max(times)


def _whole_step(planned: Planned, ranks: Sequence[RankTimes], bound: int) -> tuple[float, float]:
    """Return the time of a step at worst (0) or best (1), and of its bubble."""
    pipeline, accumulation = planned.layout.pipeline, planned.layout.accumulation
    # head and loss, outside of blocks, run for every microbatch
    forward = max(rank.in_turn(bound, "forward", "between") for rank in ranks)
    backward = max(rank.in_turn(bound, "backward") for rank in ranks)
    update = max(rank.in_turn(bound, "update") for rank in ranks)
    beside = max(rank.beside(bound) for rank in ranks)
    computing, idle = forward + backward, 0.0
    if pipeline is not None:
        num = sum(action.kind == "forward" for action in pipeline.table[0]) * accumulation
        f, b = forward / num, backward / num
        costs = Costs(forward=f, backward=b, backward_input=b / 2, backward_weight=b / 2)
        idle = accumulation * simulate(pipeline.table, costs=costs).makespan - computing
        computing += idle
    if bound == 1:
        return max(computing, beside) + update, idle
    overlapped = max(rank.of("overlapped", bound) for rank in ranks)
    hidden = (1 - EXPOSED) * min(computing, overlapped)
    return computing + beside - hidden + update, idle


def _times(planned: Planned, entry: Entry, phase: Phase | None) -> float:
    """Return how many times the full step has an entry of a rank's record."""
    if entry.event == "copy":
        if entry.where[0] == "to host" and planned.layout.dims.dp_replicate > 1:
            return 1.0  # gradients are copied once, after the sum over model copies
        # counted as the gather or reduction that needs it
        entry = entry._replace(event="message", where=("fsdp", *entry.where))
    return planned.shortened.times(entry, phase)


def _time(
    entry: Entry, *, device: Device, axes: Mapping[str, Axis], kept: float, is_on_host: bool
) -> tuple[str, Time]:
    """Return the resource that an entry needs, and its time."""
    if entry.event == "message":
        axis, operator, _ = entry.where
        if axis not in axes:
            return "waits", NONE
        share = axes[axis].seconds(collective(operator), entry.size, device=device)
        return "overlapped" if axis in OVERLAPPED else "waits", (share.worst, share.best)
    if entry.event == "copy":
        return entry.where[0], _spread(entry.size / device.to_host, device.copies)
    if entry.event == "pass" and is_on_host:
        return "offload", (entry.size / device.on_host.worst, entry.size / device.on_host.best)
    if entry.event == "pass":
        return "passes", _spread(entry.size / device.bandwidth, device.passes, best=kept)
    if "attention" in entry.where[0]:
        return "attention", _spread(entry.size / device.flops, device.attention)
    filled = _filled(entry.where[2])
    return "products", _spread(entry.size / device.flops / filled, device.products)


def _spread(seconds: float, share: Share, *, best: float = 1.0) -> Time:
    return seconds / share.worst, seconds * best / share.best


def _filled(shapes: str) -> float:
    """Return the filled share of a product's tiles."""
    sides = [[int(n) for n in shape.split("x")] for shape in shapes.split()]
    if len(sides) < 2:
        return 1.0
    rows, columns = sides[-2][-2], sides[-1][-1]
    return (rows / ceil(rows / TILE) / TILE) * (columns / ceil(columns / TILE) / TILE)


def plan_step(planned: Planned, arguments: argparse.Namespace) -> str:
    """Return the bounds of a step as text."""
    step_time = time_step(planned, rehearse_ranks(planned, validates=False))
    device = planned.device
    lines = [
        planned.headline(),
        "",
        f"a step: {step_time.best:.3g} to {step_time.worst:.3g} s; "
        f"{step_time.tokens_per_second[0]:,.0f} to {step_time.tokens_per_second[1]:,.0f} tokens/s; "
        f"MFU {step_time.mfu[0]:.0f} to {step_time.mfu[1]:.0f} %",
        f"what binds: {step_time.binds}",
        "",
        f"{'seconds':<12}{'at best':>10}{'at worst':>10}",
        *(
            f"{name:<12}{best:>10.3f}{worst:>10.3f}"
            for name, (worst, best) in step_time.resources.items()
            if worst
        ),
        "",
        f"Bounds, not a promise of a number: {device.name} at {_percent(device.products)} of "
        f"{device.flops / 1e12:.0f} TFLOP/s in products, {_percent(device.attention)} in "
        f"attention, {_percent(device.passes)} of {device.bandwidth / 1e12:.2f} TB/s, "
        f"{_percent(device.links)} of {device.link / 1e9:.0f} GB/s within a machine and "
        f"{device.network / 1e9:.0f} GB/s between machines{_to_host(planned)}; the shares are in "
        "torchtitan/tools/plan/devices.py.",
    ]
    return "\n".join(lines) + "\n"


def _to_host(planned: Planned) -> str:
    if not planned.config.training.enable_cpu_offload:
        return ""
    device = planned.device
    return (
        f", {_percent(device.copies)} of {device.to_host / 1e9:.0f} GB/s to and from the host. Its "
        f"update moves {device.on_host.worst / 1e9:.0f} to {device.on_host.best / 1e9:.0f} GB/s"
    )


def _percent(share: Share) -> str:
    return f"{share.worst:.0%} to {share.best:.0%}"
