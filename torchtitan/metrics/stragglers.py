"""Straggler detection: which rank do the other ranks wait for?

All ranks end a step together, because each waits for the slowest one in the next collective. So
step times do not tell ranks apart, nor do times of forward and backward, which contain collectives.
Two times do, since no collective is inside:

    data       waiting for the next batch
    update     gradient clipping and the optimizer step

A rank that lacks part of its core or of its memory bandwidth has slow updates. On CUDA, device
events time them, and the update of a logged step counts for the next one: it has just been
launched, and waiting for it would leave the device without work. At a logged step both times are
gathered together with the loss, and each rank's times are compared with the median of the other
ranks; updates only within a pipeline stage, whose ranks have equally many parameters. Any process
on a busy machine may wait for some milliseconds, so a rank is reported after being the slowest at 5
logged steps in a row, then at 10, 20, ...
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchtitan.base.device import to_device

logger = logging.getLogger(__name__)
KINDS = {
    "data": ("waiting for data", "check the storage and training.dataloader.num_workers"),
    "update": ("optimizer updates", "check for throttling (`nvidia-smi -q -d PERFORMANCE`)"),
}
"""Timed work: its description and a remedy."""
NUM_TO_REPORT = 5
"""Logged steps in a row after which the slowest rank is reported for the first time."""


class Stragglers:
    """Time the work of this rank and find the slowest rank.

    Args:
        ratio: Report a rank that takes more than this many times the median of the
            other ranks.
        num_stages: Pipeline stages. Each has the same number of consecutive ranks.
        hosts: Host name of each rank.
        device: Device of this rank.
        clock: Returns seconds.
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
        self._slowest, self._num_in_a_row, self._report_at = 0, 0, NUM_TO_REPORT

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Time the update of a step. On CUDA the host does not wait."""
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
        """Return this rank's seconds per step of each kind since the last call, on the device.

        On CUDA the host waits for no update but those before the last one.
        """
        update_seconds = self._update_seconds / num_steps
        if before := self._events[:-1]:
            before[-1][1].synchronize()
            update_seconds = sum(a.elapsed_time(b) for a, b in before) / 1e3 / len(before)
            del self._events[:-1]
        self._update_seconds = 0.0
        nanoseconds = [round(1e9 * x) for x in (data_seconds / num_steps, update_seconds)]
        return list((to_device(nanoseconds, self._device).double() / 1e9).unbind())

    def find(
        self, times: Sequence[Sequence[float]], *, step: int, step_seconds: float
    ) -> dict[str, float | int]:
        """Return the slowest rank, its ratio, and the greatest ratio of each kind; report the rank
        if it stays the slowest.

        Args:
            times: Seconds per step of each rank (outer) and kind (inner).
            step: The logged step.
            step_seconds: Duration of a step.
        """
        ratios = {
            kind: self._ratios(kind, [of_rank[index] for of_rank in times], step_seconds)
            for index, kind in enumerate(KINDS)
        }
        ratio, rank, kind = max(
            (ratio, rank, kind) for kind in KINDS for rank, ratio in ratios[kind].items()
        )
        self._report(step, kind=kind, rank=rank, ratio=ratio)
        greatest = {
            f"slowest_{kind}_ratio": max(found.values()) for kind, found in ratios.items() if found
        }
        return {"slowest_rank": rank, "slowest_ratio": ratio, **greatest}

    def _ratios(self, kind: str, seconds: Sequence[float], step_seconds: float) -> dict[int, float]:
        """Return each rank's time divided by the median of the other ranks."""
        stages: dict[int, dict[int, float]] = {}
        for rank, taken in enumerate(seconds):
            stages.setdefault(self._stages[rank] if kind == "update" else 0, {})[rank] = taken
        ratios = {}
        for stage in stages.values():
            for rank, median in medians_of_others(stage).items():
                if kind == "data":  # the median may be 0: how much longer does the step take?
                    late = min(max(stage[rank] - median, 0.0), 0.999 * step_seconds)
                    ratios[rank] = step_seconds / (step_seconds - late)
                elif median > 0:
                    ratios[rank] = stage[rank] / median
        return ratios

    def _report(self, step: int, *, kind: str, rank: int, ratio: float) -> None:
        is_slow = ratio > self._ratio
        if not is_slow or rank != self._slowest:
            self._num_in_a_row, self._report_at = 0, NUM_TO_REPORT
        self._slowest = rank
        self._num_in_a_row += is_slow
        if self._num_in_a_row == self._report_at:
            self._report_at *= 2
            work, remedy = KINDS[kind]
            logger.warning(
                "Step %d: rank %d (%s) takes %.1f times the median of the other ranks in %s, the "
                "slowest rank at %d logged steps in a row; %s",
                *(step, rank, self._hosts[rank], ratio, work, self._num_in_a_row, remedy),
            )


def medians_of_others(values: Mapping[int, float]) -> dict[int, float]:
    """Return the median of the other values for each key; {} for fewer than two values."""
    keys = sorted(values, key=values.__getitem__)
    lower, upper = (len(values) - 2) // 2, (len(values) - 1) // 2
    medians = {}
    for index, key in enumerate(keys if len(values) > 1 else ()):
        low, high = (keys[middle + (middle >= index)] for middle in (lower, upper))
        medians[key] = (values[low] + values[high]) / 2
    return medians
