"""Which rank the others wait for.

All ranks end a step together, since each waits for the slowest in the next collective, so step
times tell nothing, and neither do those of forward and backward: collectives are inside them. What
tells ranks apart is time that each spends alone:

    data       waiting for the next batch
    update     clipping and the optimizer's step, of every step: no collective is inside

A rank that lacks a part of its core or memory bandwidth is behind in its updates. On CUDA the
device's own clock times them. At a logged step these two numbers travel with the loss, in the one
gather that is made anyway, and each rank's are compared with the median of the others: for the
update with those of its pipeline stage, whose ranks hold as many parameters. Any busy machine lets
a process wait for some milliseconds now and then, so a rank is named once it is the slowest at five
logged steps in a row, then at the 10th, the 20th ...
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan.mesh.ranks import gather

logger = logging.getLogger(__name__)
KINDS = {
    "data": ("waiting for data", "look at the storage and training.dataloader.num_workers"),
    "update": ("optimizer updates", "is it throttled (`nvidia-smi -q -d PERFORMANCE`), or shared?"),
}
"""What is timed, and where to look."""
OWN = "own_times"
IN_A_ROW = 5
"""Logged steps at which a rank must be the slowest to be named."""
NAME_BYTES = 64


class Stragglers:
    """Times what this rank does alone, and finds the slowest of all ranks.

    `num_stages` of the pipeline share the ranks evenly, in order. `hosts` are the names of the
    ranks' machines. A rank that takes more than `ratio` times as long as the others is named.
    """

    def __init__(
        self,
        *,
        ratio: float,
        num_stages: int,
        hosts: Sequence[str],
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._ratio, self._hosts, self._device, self._clock = ratio, hosts, device, clock
        self._stages = [rank * num_stages // len(hosts) for rank in range(len(hosts))]
        self._update_seconds = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._behind, self._num_behind = 0, 0

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Count the device's time inside as the update of a step; nothing waits for the device."""
        if self._device.type == "cuda":
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            yield
            pair[1].record()
            self._events.append(pair)
        else:
            before = self._clock()
            yield
            self._update_seconds += self._clock() - before

    def measure(self, *, data_seconds: float, num_steps: int) -> list[Tensor]:
        """Return this rank's seconds of each kind since the last call, per step, on the device."""
        if self._events:
            torch.cuda.synchronize(self._device)
            self._update_seconds = sum(a.elapsed_time(b) for a, b in self._events) / 1e3
            self._events.clear()
        seconds = [data_seconds / num_steps, self._update_seconds / num_steps]
        self._update_seconds = 0.0
        return list(torch.tensor(seconds, dtype=torch.float64).to(self._device).unbind())

    def find(
        self, times: Sequence[Sequence[float]], *, step: int, step_seconds: float
    ) -> dict[str, float | int]:
        """Return the slowest rank as figures of a row: by kind how many times as long as the
        others it takes, and of which rank the greatest is. Warn of it if it stays the slowest.

        `times`: seconds per step of each kind of `KINDS`, of each rank.
        """
        ratios = {
            kind: self._ratios(kind, [of_rank[index] for of_rank in times], step_seconds)
            for index, kind in enumerate(KINDS)
        }
        ratio, rank, kind = max(
            (ratio, rank, kind) for kind in KINDS for rank, ratio in ratios[kind].items()
        )
        self._warn(step, kind=kind, rank=rank, ratio=ratio)
        most = {kind: max(found.values()) for kind, found in ratios.items() if found}
        return {
            "slowest_rank": rank,
            "slowest_ratio": ratio,
            **{f"slowest_{kind}_ratio": ratio for kind, ratio in most.items()},
        }

    def _ratios(self, kind: str, seconds: Sequence[float], step_seconds: float) -> dict[int, float]:
        groups: dict[int, dict[int, float]] = {}
        for rank, own in enumerate(seconds):
            stage = self._stages[rank] if kind == "update" else 0
            groups.setdefault(stage, {})[rank] = own
        ratios = {}
        for group in groups.values():
            for rank, usual in medians_of_others(group).items():
                if kind == "data":  # others may not wait at all: how much longer is the step?
                    late = min(max(group[rank] - usual, 0.0), 0.999 * step_seconds)
                    ratios[rank] = step_seconds / (step_seconds - late)
                elif usual > 0:
                    ratios[rank] = group[rank] / usual
        return ratios

    def _warn(self, step: int, *, kind: str, rank: int, ratio: float) -> None:
        is_behind = ratio > self._ratio
        self._num_behind = is_behind * (self._num_behind * (self._behind == rank) + 1)
        self._behind, num = rank, self._num_behind // IN_A_ROW
        if self._num_behind == num * IN_A_ROW and num and num & (num - 1) == 0:  # 1, 2, 4, 8 ...
            what, remedy = KINDS[kind]
            logger.warning(
                "Step %d: rank %d (%s) is %.1f times behind the median of the others in %s, the "
                "slowest at %d logged steps in a row; all ranks wait for it; %s",
                *(step, rank, self._hosts[rank], ratio, what, self._num_behind, remedy),
            )


def medians_of_others(values: Mapping[int, float]) -> dict[int, float]:
    """Return for each key the median of the other values; nothing where there are none."""
    by_size = sorted(values, key=values.__getitem__)
    lower, upper = (len(values) - 2) // 2, (len(values) - 1) // 2
    medians = {}
    for place, key in enumerate(by_size if len(values) > 1 else ()):
        low, high = (by_size[middle + (middle >= place)] for middle in (lower, upper))
        medians[key] = (values[low] + values[high]) / 2
    return medians


def build_stragglers(
    *, ratio: float, num_stages: int, world_size: int, device: torch.device
) -> Stragglers | None:
    """Build what finds the slowest of several ranks; None: with a ratio of 0 nobody looks."""
    if not ratio or world_size == 1:
        return None
    name = socket.gethostname().encode()[:NAME_BYTES].ljust(NAME_BYTES)
    names = gather(torch.tensor(list(name), dtype=torch.uint8, device=device)).tolist()
    hosts = [bytes(one).decode(errors="replace").strip() for one in names]
    return Stragglers(ratio=ratio, num_stages=num_stages, hosts=hosts, device=device)
