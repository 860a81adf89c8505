"""Measure matrix products of each device, and collectives of each mesh axis.

A collective is as fast as its slowest rank, so all groups of an axis are timed at once, as in
training. Then pairs of neighbours are timed, to find the slow link of a slow group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist

from torchtitan.base.device import device_name, peak_flops
from torchtitan.mesh.dims import Mesh
from torchtitan.tools.check.ranks import Checked, Finding, Ranks, usual
from torchtitan.tools.plan.devices import device_named
from torchtitan.tools.plan.links import axes_of

ROUNDS, SECONDS = 3, 0.5
"""Number and length of the measurements of products; the best counts."""
LEAST_RATE = {"cuda": 0.75, "cpu": 0.4}
"""Part of the usual rate that each device must reach; CPU processes disturb each other."""
LEAST_OF_SHEET = 0.4
"""Part of the data sheet's rate that devices must reach."""
LEAST_LINK = {"cuda": 0.5, "cpu": 0.2}
"""Part of the usual bandwidth that each group and pair must reach."""
LEAST_OF_PLAN = 0.5
"""Part of the planner's lower bound that an axis must reach."""
SENT = {"cuda": 2**28, "cpu": 2**22}
"""Bytes per collective."""
TIMES = 5
SMALL_TIMES = 20


def check_products(ranks: Ranks) -> Checked:
    """Multiply on all devices at once, long enough to reach limits of power or heat."""
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    best = 0.0
    for _ in range(ROUNDS):
        dist.barrier()
        best = max(best, multiply(ranks.device, dtype=dtype, seconds=SECONDS))
    rates = ranks.gather(best)
    if not rates:
        return Checked(name="products", summary="")
    most = usual(rates)
    findings = [
        Finding(
            f"devices must have similar speed, {ranks.named([rank])} reaches {rate / 1e12:.3g} "
            f"TFLOP/s where {most / 1e12:.3g} are usual",
            "check for throttling (`nvidia-smi -q -d PERFORMANCE`) and other programs, or leave "
            "that machine out: every step waits for it",
        )
        for rank, rate in enumerate(rates)
        if rate < LEAST_RATE[ranks.device.type] * most
    ]
    sheet = peak_flops(ranks.device, dtype=dtype)
    if sheet is not None and most < LEAST_OF_SHEET * sheet.value:
        findings.append(
            Finding(
                f"devices reach {most / 1e12:.3g} TFLOP/s, {most / sheet.value:.0%} of the "
                f"{sheet.source}",
                "check the limits of power and clocks (`nvidia-smi -q -d POWER,CLOCK`)",
            )
        )
    slowest = rates.index(min(rates))
    summary = (
        f"{min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s, slowest "
        f"{ranks.named([slowest])}"
    )
    return Checked(
        name="products", summary=summary, figures={"flops_per_s": rates}, findings=findings
    )


def multiply(device: torch.device, *, dtype: torch.dtype, seconds: float) -> float:
    """Return the rate of square products over `seconds`, in FLOP/s."""
    n = 8192 if device.type == "cuda" else 512
    a_NN = torch.ones(n, n, dtype=dtype, device=device)
    out_NN = a_NN @ a_NN
    num, started = 0, _now(device)
    while (elapsed := _now(device) - started) < seconds:
        for _ in range(4):
            torch.mm(a_NN, a_NN, out=out_NN)
        num += 4
    return num * 2 * n**3 / elapsed


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@dataclass(frozen=True, kw_only=True)
class Link:
    """Speed of a group's all-reduce, or of an exchange between two neighbours."""

    ranks: tuple[int, ...]
    bandwidth: float
    """Bytes/s per rank and direction, the bus bandwidth of nccl-tests."""
    latency: float = 0.0
    """Seconds of an all-reduce of one number."""


def check_axes(ranks: Ranks, mesh: Mesh) -> Iterator[Checked]:
    """Time the collectives of each axis whose degree is above 1."""
    views = {
        **dict.fromkeys(("tp", "fsdp", "dp_replicate", "pp"), mesh.params),
        "cp": mesh.data,
        **(dict.fromkeys(("ep", "efsdp"), mesh.experts) if mesh.dims.ep > 1 else {}),
    }
    for name, view in views.items():
        if view.get_group(name).size() > 1:
            yield _check_axis(ranks, name, view.get_group(name), mesh=mesh)


def _check_axis(ranks: Ranks, name: str, group: dist.ProcessGroup, *, mesh: Mesh) -> Checked:
    members = tuple(dist.get_process_group_ranks(group))
    whole = Link(
        ranks=members,
        bandwidth=_reduce(group, ranks.device),
        latency=_reduce_one(group, ranks.device),
    )
    groups = {link.ranks: link for link in ranks.gather(whole)}
    pairs = [link for links in ranks.gather(_send(members, group, ranks)) for link in links]
    if not groups:
        return Checked(name=name, summary="")
    findings = [
        *_find_slow(ranks, name, [*groups.values()]),
        *_find_slow(ranks, name, [p for p in pairs if _is_near(ranks, p)]),
        *_find_slow(ranks, name, [p for p in pairs if not _is_near(ranks, p)]),
    ]
    slowest = min(groups.values(), key=lambda link: link.bandwidth)
    latency = usual([link.latency for link in groups.values()])
    promised = promised_bandwidth(ranks, name, mesh)
    if promised is not None and slowest.bandwidth < LEAST_OF_PLAN * promised:
        findings.append(
            Finding(
                f"{name} reduces at {slowest.bandwidth / 1e9:.3g} GB/s on "
                f"{ranks.named(slowest.ranks)}, where such machines usually reach "
                f"{promised / 1e9:.3g} GB/s",
                "NCCL may use TCP: start with NCCL_DEBUG=INFO, look for NET/Socket, and set "
                "NCCL_IB_HCA or NCCL_SOCKET_IFNAME",
            )
        )
    summary = (
        f"{latency * 1e6:.0f} us, {slowest.bandwidth / 1e9:.3g} GB/s; slowest "
        f"{ranks.named(slowest.ranks)}"
    )
    figures = {
        "groups": [link.__dict__ for link in groups.values()],
        "pairs": [link.__dict__ for link in pairs],
    }
    return Checked(name=name, summary=summary, figures=figures, findings=findings)


def promised_bandwidth(ranks: Ranks, name: str, mesh: Mesh) -> float | None:
    """Return the planner's lower bound of an axis's bandwidth; None for an unknown device."""
    device = None if ranks.device.type == "cpu" else device_named(device_name(ranks.device))
    if device is None:
        return None
    per_machine = min(ranks.machines.count(machine) for machine in ranks.machines)
    axis = axes_of(mesh.dims, gpus_per_node=per_machine)[name]
    size = SENT["cuda"]
    return (
        2
        * (axis.degree - 1)
        / axis.degree
        * size
        / axis.seconds("all-reduce", size, device=device).worst
    )


def _find_slow(ranks: Ranks, name: str, links: list[Link]) -> list[Finding]:
    """Compare links of the same kind."""
    if not links:
        return []
    most = usual([link.bandwidth for link in links])
    return [
        Finding(
            f"{name}: {ranks.named(link.ranks)} exchange at {link.bandwidth / 1e9:.3g} GB/s, "
            f"where {most / 1e9:.3g} GB/s are usual",
            "check the links of these machines (`nvidia-smi topo -m`, `ibstat`), or leave out the "
            "machine that is in all slow groups",
        )
        for link in links
        if link.bandwidth < LEAST_LINK[ranks.device.type] * most
    ]


def _is_near(ranks: Ranks, pair: Link) -> bool:
    first, second = pair.ranks
    return ranks.machines[first] == ranks.machines[second]


def _reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bandwidth of the fastest of several all-reduces."""
    numbers = torch.ones(SENT[device.type] // 4, device=device)
    seconds = min(_timed(lambda: dist.all_reduce(numbers, group=group), group, device))
    return 2 * (group.size() - 1) / group.size() * SENT[device.type] / seconds


def _reduce_one(group: dist.ProcessGroup, device: torch.device) -> float:
    number = torch.zeros(1, device=device)

    def many() -> None:
        for _ in range(SMALL_TIMES):
            dist.all_reduce(number, group=group)

    return min(_timed(many, group, device)) / SMALL_TIMES


def _send(members: tuple[int, ...], group: dist.ProcessGroup, ranks: Ranks) -> list[Link]:
    """Exchange between neighbours, every second pair at once; return this rank's pair with the
    next one."""
    own, rank = members.index(ranks.launch.rank), ranks.launch.rank
    there = torch.ones(SENT[ranks.device.type] // 4, device=ranks.device)
    back = torch.empty_like(there)
    found = []
    for phase in (0, 1):
        other = own + 1 if own % 2 == phase else own - 1
        peer = members[other] if 0 <= other < len(members) else None

        def exchange(peer: int | None = peer) -> None:
            if peer is None:
                return
            for work in dist.batch_isend_irecv(
                [
                    dist.P2POp(dist.isend, there, peer, group=group),
                    dist.P2POp(dist.irecv, back, peer, group=group),
                ]
            ):
                work.wait()

        seconds = min(_timed(exchange, group, ranks.device))
        if peer is not None and peer > rank:
            size = SENT[ranks.device.type]
            found.append(Link(ranks=(rank, peer), bandwidth=size / seconds))
    return found


def _timed(work: Callable[[], None], group: dist.ProcessGroup, device: torch.device) -> list[float]:
    """Return the seconds of several runs of `work`, started by all ranks of the group at once."""
    work()  # creates connections
    seconds = []
    for _ in range(TIMES):
        dist.barrier(group=group)
        started = _now(device)
        work()
        seconds.append(_now(device) - started)
    return seconds
