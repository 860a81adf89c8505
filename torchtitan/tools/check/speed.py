"""Measure matrix products of each device, and collectives of each mesh axis.

A collective is as fast as its slowest rank, so all groups of an axis are timed at once, as in
training. Then pairs of neighbours are timed, to find the slow link of a slow group.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist

from torchtitan.mesh.dims import Mesh
from torchtitan.tools.check.ranks import Checked, Ranks, usual

ROUNDS, SECONDS = 3, 0.5
"""Number and length of the measurements of products; the best counts."""
LEAST_RATE = {"cuda": 0.75, "cpu": 0.4}
"""Part of the usual rate that each device must reach; CPU processes disturb each other."""
LEAST_LINK = {"cuda": 0.5, "cpu": 0.2}
"""Part of the usual bandwidth that each group and pair must reach."""
SENT = {"cuda": 2**28, "cpu": 2**22}
"""Bytes per collective."""
TIMES = 5
Link = tuple[tuple[int, ...], float]
"""Ranks of a group or pair, and bytes/s per rank and direction (nccl-tests' bus bandwidth)."""


def check_products(ranks: Ranks) -> Checked:
    """Multiply on all devices at once, long enough to reach limits of power or heat."""
    dtype = torch.bfloat16 if ranks.device.type == "cuda" else torch.float32
    best = 0.0
    for _ in range(ROUNDS):
        dist.barrier()
        best = max(best, multiply(ranks.device, dtype=dtype, seconds=SECONDS))
    rates = ranks.gather(best)
    if not rates:
        return Checked(name="products")
    most = usual(rates)
    faults = [
        f"devices must have similar speed, {ranks.named([rank])} reaches {rate / 1e12:.3g} "
        f"TFLOP/s where {most / 1e12:.3g} are usual"
        for rank, rate in enumerate(rates)
        if rate < LEAST_RATE[ranks.device.type] * most
    ]
    summary = (
        f"{min(rates) / 1e12:.3g} to {max(rates) / 1e12:.3g} TFLOP/s, slowest "
        f"{ranks.named([rates.index(min(rates))])}"
    )
    return Checked(name="products", summary=summary, faults=faults)


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


def check_axes(ranks: Ranks, mesh: Mesh) -> Iterator[Checked]:
    """Time the collectives of each axis whose degree is above 1."""
    views = {
        **dict.fromkeys(("tp", "fsdp", "dp_replicate", "pp"), mesh.params),
        "cp": mesh.data,
        **(dict.fromkeys(("ep", "efsdp"), mesh.experts) if mesh.dims.ep > 1 else {}),
    }
    for name, view in views.items():
        if view.get_group(name).size() > 1:
            yield _check_axis(ranks, name, view.get_group(name))


def _check_axis(ranks: Ranks, name: str, group: dist.ProcessGroup) -> Checked:
    members = tuple(dist.get_process_group_ranks(group))
    groups = dict(ranks.gather((members, _reduce(group, ranks.device))))
    pairs = [pair for answer in ranks.gather(_exchange(members, group, ranks)) for pair in answer]
    if not groups:
        return Checked(name=name)
    within = [pair for pair in pairs if len({ranks.machines[rank] for rank in pair[0]}) == 1]
    across = [pair for pair in pairs if pair not in within]
    faults = []
    for links in ([*groups.items()], within, across):  # each is compared with its kind
        most = usual([rate for _, rate in links]) if links else 0.0
        faults += [
            f"{ranks.named(of)} exchange at {rate / 1e9:.3g} GB/s, where {most / 1e9:.3g} GB/s are "
            f"usual"
            for of, rate in links
            if rate < LEAST_LINK[ranks.device.type] * most
        ]
    slowest = min(groups, key=lambda of: groups[of])
    summary = f"{groups[slowest] / 1e9:.3g} GB/s; slowest {ranks.named(slowest)}"
    return Checked(name=name, summary=summary, faults=faults)


def _reduce(group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the bandwidth of the fastest of several all-reduces."""
    numbers = torch.ones(SENT[device.type] // 4, device=device)
    seconds = _time(lambda: dist.all_reduce(numbers, group=group), group, device)
    return 2 * (group.size() - 1) / group.size() * SENT[device.type] / seconds


def _exchange(members: tuple[int, ...], group: dist.ProcessGroup, ranks: Ranks) -> list[Link]:
    """Exchange between neighbours, every second pair at once; return the pair with the next one."""
    own, size = members.index(ranks.launch.rank), SENT[ranks.device.type]
    buffer = torch.ones(size // 4, device=ranks.device)
    back = torch.empty_like(buffer)
    links: list[Link] = []
    for phase in (0, 1):
        neighbor = own + 1 if own % 2 == phase else own - 1
        peers = members[neighbor : neighbor + 1] if neighbor >= 0 else ()

        def exchange(peers: tuple[int, ...] = peers) -> None:
            for peer in peers:
                send = dist.P2POp(dist.isend, buffer, peer, group=group)
                receive = dist.P2POp(dist.irecv, back, peer, group=group)
                for work in dist.batch_isend_irecv([send, receive]):
                    work.wait()

        seconds = _time(exchange, group, ranks.device)
        links += [(members[own : own + 2], size / seconds) for _ in peers if neighbor > own]
    return links


def _time(work: Callable[[], object], group: dist.ProcessGroup, device: torch.device) -> float:
    """Return the seconds of the fastest of several runs, started by all ranks of the group."""
    work()  # creates connections
    seconds = []
    for _ in range(TIMES):
        dist.barrier(group=group)
        started = _now(device)
        work()
        seconds.append(_now(device) - started)
    return min(seconds)
