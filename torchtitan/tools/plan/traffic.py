"""The command `traffic`, and the links between ranks: bytes and time of each collective.

Ranks are numbered as in `mesh/dims.py` and fill one machine after another. If the ranks of an axis
are on several machines, a collective moves the data of each machine through the adapters of its
ranks, all at once, and within machines over the fast links.

A ring moves, per rank, for an unsharded tensor of S bytes over n ranks: all-gather and
reduce-scatter S (n-1)/n, all-reduce twice that, all-to-all the same share of a rank's tensor. Sizes
are of unsharded tensors, as in a collective's argument or result. Closed formulas of the
counts are in docs/plan.md.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from torchtitan.mesh.dims import ParallelDims
from torchtitan.tools.plan.allocator import GIB
from torchtitan.tools.plan.devices import Device, Share
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.ranks import rehearse_ranks
from torchtitan.tools.plan.tape import Record
from torchtitan.tools.verbs import format_table

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all", "send", "receive"]


NAMES: Mapping[str, Collective] = {
    "allgather": "all-gather",
    "reducescatter": "reduce-scatter",
    "allreduce": "all-reduce",
    "alltoall": "all-to-all",
    "send": "send",
    "recv": "receive",
}


def collective(operator: str) -> Collective:
    """Return the collective of one of torch's operators."""
    words = operator.replace("_", "")
    for name, link in NAMES.items():
        if words.startswith(name):
            return link
    raise AssertionError(f"unknown collective {operator}")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks of one axis of the mesh."""

    degree: int
    on_node: int
    """Number of them on one machine."""

    def moved(self, operation: Collective, size: int) -> tuple[float, float]:
        """Return the bytes that a rank sends within its machine, and to other machines.

        `size` has the bytes of the unsharded tensor, or of the tensor that is sent.
        """
        if operation == "receive":  # the sender counts it
            return 0.0, 0.0
        if operation == "send":
            return (0.0, float(size)) if self.on_node < self.degree else (float(size), 0.0)
        total = (2.0 if operation == "all-reduce" else 1.0) * size
        if operation == "all-to-all":
            near, far = self.on_node - 1, self.degree - self.on_node
            return total * near / self.degree, total * far / self.degree
        num_nodes = self.degree / self.on_node
        inside = total * (self.on_node - 1) / self.on_node
        return inside, total * (num_nodes - 1) / num_nodes / self.on_node

    def seconds(self, operation: Collective, size: int, *, device: Device) -> Share:
        """Return the time of a collective, at worst and at best."""
        inside, off = self.moved(operation, size)
        if not inside and not off:
            return Share(worst=0.0, best=0.0)
        ideal = max(inside / device.link, off / device.network)
        return Share(
            worst=ideal / device.links.worst + device.latency.worst,
            best=ideal / device.links.best + device.latency.best,
        )


def axes_of(dims: ParallelDims, *, gpus_per_node: int) -> Mapping[str, Axis]:
    """Return the axes by name, from the distance between their ranks."""
    strides = {
        "tp": (1, dims.tp),
        "cp": (dims.tp, dims.cp),
        "fsdp": (dims.tp, dims.fsdp),
        "dp_replicate": (dims.tp * dims.fsdp, dims.dp_replicate),
        "pp": (dims.world_size // dims.pp, dims.pp),
        "ep": (1, dims.ep),
        "efsdp": (dims.ep, dims.efsdp),
        "dp": (dims.cp * dims.tp, dims.dp),
        "world": (1, dims.world_size),
    }
    return {
        name: Axis(degree=degree, on_node=max(1, min(degree, gpus_per_node // stride)))
        for name, (stride, degree) in strides.items()
    }


class Row(NamedTuple):
    """Collectives of one kind over one axis, per rank and step."""

    axis: str
    collective: Collective
    calls: float
    size: float
    """Bytes of the unsharded tensors."""
    on_node: float
    off_node: float
    """Bytes that the rank sends within its machine and to other machines."""


def count_traffic(planned: Planned, record: Record) -> list[Row]:
    """Count the messages of a rank in a step."""
    axes = axes_of(planned.layout.dims, gpus_per_node=planned.gpus_per_node)
    sums: dict[tuple[str, Collective], list[float]] = defaultdict(lambda: [0.0] * 4)
    for piece, end in record.bounds():
        for entry in record.entries[piece.start : end]:
            if entry.event != "message":
                continue
            axis, operator, _ = entry.where
            operation = collective(operator)
            times = planned.shortened.times(entry, piece.phase)
            moved = axes[axis].moved(operation, entry.size) if axis in axes else (0.0, 0.0)
            row = sums[axis, operation]
            for index, value in enumerate((1, entry.size, *moved)):
                row[index] += times * value
    return [Row(*key, *row) for key, row in sorted(sums.items())]


def plan_traffic(planned: Planned, _: argparse.Namespace) -> Iterator[str]:
    """Yield the table of each pipeline rank's traffic."""
    parts = [planned.headline()]
    records = rehearse_ranks(planned, validates=False)
    for number, record in zip(planned.pipeline_ranks, records, strict=True):
        rows = count_traffic(planned, record)
        title = f"pipeline rank {number}, " if len(records) > 1 else ""
        parts.append(f"{title}GiB of a rank in a step\n{_table(rows)}")
    yield "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    title = ("axis, collective", "calls", "whole", "on node", "off node")
    cells = [
        (f"{row.axis} {row.collective}", f"{row.calls:.0f}", *(f"{n / GIB:.3f}" for n in row[3:]))
        for row in rows
    ]
    return "\n".join(format_table([title, *cells]))
