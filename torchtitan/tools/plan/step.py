"""Bounds of the time of a step, from a rank's arithmetic, memory traffic, messages and launches.

Each resource has a time at worst and at best, from the shares of its peak in `devices.py`:

    products    matrix products, by shape: sides are rounded up to tiles of 128
    attention   causal attention, half of the scores
    passes      all other operators: bytes read and written
    waits       collectives that computation waits for: tp, cp, ep
    overlapped  collectives beside computation: gathered weights, reduced gradients
    host        launches of operators, one after the other, beside the device's work

A microbatch's forward takes products, attention, passes and waits in turn. A pipeline's
microbatches are simulated with its table (`schedule.py`), which adds the bubble. At best, all that
can overlap does. At worst a third of the overlapped collectives does not.

The bounds do not cover badly chosen kernels, throttled clocks or a shared network. The compiler
fuses an unknown part of the passes, so half of their bytes count at best, all at worst. Copies of
offloaded weights and the update on the host are not timed.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil

from torchtitan.parallel.pipeline.schedules import Kind
from torchtitan.tools.plan.devices import Device, Share
from torchtitan.tools.plan.job import OVERLAPPED, Planned
from torchtitan.tools.plan.ranks import rehearse_ranks
from torchtitan.tools.plan.schedule import simulate
from torchtitan.tools.plan.tape import Entry, Record
from torchtitan.tools.plan.traffic import Axis, axes_of, collective
from torchtitan.tools.verbs import format_table

TILE = 128
EXPOSED = 0.35
"""Share of the shorter of computation and overlapped collectives that the longer one does not hide
at worst, fitted with the shares of `devices.py`."""
FUSED = 1 / 2
"""Share of the bytes of passes that remains at best if blocks are compiled."""
Time = tuple[float, float]
"""Seconds at worst, and at best."""
NONE: Time = (0.0, 0.0)
IN_TURN = ("products", "attention", "passes", "waits")


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
        name: max(((rank.of(name, 0), rank.of(name, 1)) for rank in ranks), key=lambda t: t[::-1])
        for name in (*IN_TURN, "overlapped", "host")
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
        for piece, end in record.bounds():
            phase = piece.phase or "between"
            for entry in record.entries[piece.start : end]:
                if entry.event in ("birth", "death"):
                    continue
                if entry[:3] not in cached:
                    cached[entry[:3]] = _time(entry, device=device, axes=axes, kept=kept)
                resource, time = cached[entry[:3]]
                times = planned.shortened.times(entry, piece.phase)
                for bound, launch in enumerate((device.launch.worst, device.launch.best)):
                    self._times[phase, resource, bound] += times * time[bound]
                    self._times[phase, "host", bound] += times * launch

    def of(self, resource: str, bound: int, *phases: str) -> float:
        """Return the time of a resource in the given phases, or in all."""
        return sum(
            time
            for (phase, name, which), time in self._times.items()
            if name == resource and which == bound and (not phases or phase in phases)
        )

    def in_turn(self, bound: int, *phases: str) -> float:
        """Return the time that the device computes and waits, or the host launches, if longer."""
        device = sum(self.of(resource, bound, *phases) for resource in IN_TURN)
        return max(device, self.of("host", bound, *phases))


def _whole_step(planned: Planned, ranks: Sequence[RankTimes], bound: int) -> tuple[float, float]:
    """Return the time of a step at worst (0) or best (1), and of its bubble."""
    pipeline, accumulation = planned.layout.pipeline, planned.layout.accumulation
    # head and loss, outside of blocks, run for every microbatch
    forward = max(rank.in_turn(bound, "forward", "between") for rank in ranks)
    backward = max(rank.in_turn(bound, "backward") for rank in ranks)
    update = max(rank.in_turn(bound, "update") for rank in ranks)
    beside = max(rank.of("overlapped", bound) for rank in ranks)
    computing, idle = forward + backward, 0.0
    if pipeline is not None:
        num = sum(action.kind == "forward" for action in pipeline.table[0]) * accumulation
        f, b = forward / num, backward / num
        costs: Mapping[Kind, float] = {
            "forward": f,
            "backward": b,
            "backward_input": b / 2,
            "backward_weight": b / 2,
        }
        idle = accumulation * simulate(pipeline.table, costs=costs).makespan - computing
        computing += idle
    if bound == 1:
        return max(computing, beside) + update, idle
    return max(computing, beside) + EXPOSED * min(computing, beside) + update, idle


def _time(
    entry: Entry, *, device: Device, axes: Mapping[str, Axis], kept: float
) -> tuple[str, Time]:
    """Return the resource that an entry needs, and its time."""
    if entry.event == "message":
        axis, operator, _ = entry.where
        if axis not in axes:
            return "waits", NONE
        share = axes[axis].seconds(collective(operator), entry.size, device=device)
        return "overlapped" if axis in OVERLAPPED else "waits", (share.worst, share.best)
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


def plan_step(planned: Planned, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the bounds of a step as text."""
    step_time = time_step(planned, rehearse_ranks(planned, validates=False))
    times = step_time.resources.items()
    cells = [(name, f"{best:.3f}", f"{worst:.3f}") for name, (worst, best) in times if worst]
    lines = [
        planned.headline(),
        "",
        f"a step: {step_time.best:.3g} to {step_time.worst:.3g} s; "
        f"{step_time.tokens_per_second[0]:,.0f} to {step_time.tokens_per_second[1]:,.0f} tokens/s; "
        f"MFU {step_time.mfu[0]:.0f} to {step_time.mfu[1]:.0f} %",
        f"what binds: {step_time.binds}",
        "",
        *format_table([("seconds", "at best", "at worst"), *cells]),
        "",
        "Bounds, not a promise of a number, from torchtitan/tools/plan/devices.py.",
    ]
    yield "\n".join(lines) + "\n"
