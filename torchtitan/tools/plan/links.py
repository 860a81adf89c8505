"""Which links the ranks of an axis talk over, and how long a collective takes on them.

Ranks are placed as `mesh/dims.py` numbers them, in order, so many to a machine. Of the ranks of an
axis some share a machine; where they do not all do, a collective moves the data of each machine
through the adapters of its ranks, all at once, and within machines over the fast links.

A ring moves, per rank, for a whole tensor of S bytes over n ranks: all-gather and reduce-scatter
S (n-1)/n, all-reduce twice that, all-to-all the same share of what a rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torchtitan.mesh.dims import ParallelDims
from torchtitan.tools.plan.devices import Device, Share

OVERLAPPED = frozenset({"fsdp", "efsdp", "dp_replicate"})
"""Axes whose collectives run beside computing; on the others computing waits."""
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
    """Return which collective an operator of torch is."""
    words = operator.replace("_", "")
    for name, found in NAMES.items():
        if words.startswith(name):
            return found
    raise AssertionError(f"no collective is known by the name of {operator}")


@dataclass(frozen=True, kw_only=True)
class Axis:
    """The ranks of one axis."""

    name: str
    degree: int
    on_node: int
    """Those of them that share a machine."""

    @property
    def leaves_node(self) -> bool:
        """Whether they are on several machines."""
        return self.on_node < self.degree

    def moved(self, what: Collective, size: int) -> tuple[float, float]:
        """Return the bytes that a rank sends to others of its machine, and to other machines.

        `size`: of the whole tensor, or of what a rank sends.
        """
        if what == "receive":  # the other rank has sent it
            return 0.0, 0.0
        if what == "send":
            return (0.0, float(size)) if self.leaves_node else (float(size), 0.0)
        total = (2.0 if what == "all-reduce" else 1.0) * size
        if what == "all-to-all":
            near, far = self.on_node - 1, self.degree - self.on_node
            return total * near / self.degree, total * far / self.degree
        num_nodes = self.degree / self.on_node
        inside = total * (self.on_node - 1) / self.on_node
        return inside, total * (num_nodes - 1) / num_nodes / self.on_node

    def seconds(self, what: Collective, size: int, *, device: Device) -> Share:
        """Return how long one takes, at worst and at best."""
        inside, off = self.moved(what, size)
        if not inside and not off:
            return Share(worst=0.0, best=0.0)
        ideal = max(inside / device.link, off / device.network)
        return Share(
            worst=ideal / device.links.worst + device.latency.worst,
            best=ideal / device.links.best + device.latency.best,
        )


def axes_of(dims: ParallelDims, *, gpus_per_node: int) -> Mapping[str, Axis]:
    """Return the axes by name, each with the distance between its ranks in mind."""
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
        name: Axis(
            name=name,
            degree=degree,
            on_node=max(1, min(degree, gpus_per_node // stride)),
        )
        for name, (stride, degree) in strides.items()
    }
