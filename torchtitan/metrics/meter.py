"""From steps to figures: what a logged step reports, and how fast the steps since the last one ran.

Reading a number from a GPU makes the host wait for it, and a loop that waits each step leaves the
GPU idle. So the loop hands over device tensors, and only `Meter.report`, called on logged steps
alone, copies them to the host: all of them at once, as float64, so that no digit is lost. That copy
also is the moment at which all work of the interval is truly done, which makes the clock right.

A meter times intervals: from `start_interval` to the first report, then from report to report. The
first one usually is step 1 alone, start-up and compilation included; no average is mixed with it.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice

import torch

from torchtitan.base.device import memory_peak_gib, peak_flops, reset_memory_peak
from torchtitan.mesh.ranks import gather
from torchtitan.metrics.rows import Row
from torchtitan.metrics.stragglers import KINDS, OWN, Stragglers

logger = logging.getLogger(__name__)


@dataclass
class _Interval:
    """What happened since the last report; times in seconds."""

    started: float
    waited_for_data: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


class Meter:
    """Count steps, tokens and time; turn them into one row of figures per report.

    `flops_per_token`: forward and backward, of the whole model. `peak_flops`: of one device, None
    where none is known. `world_size`: devices that share the work. `stragglers`: finds the slowest
    rank; None: nobody looks. `clock`: seconds, for tests.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak_flops: float | None,
        world_size: int,
        device: torch.device,
        stragglers: Stragglers | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._world_size = world_size
        self._device = device
        self._stragglers = stragglers
        self._clock = clock
        self._interval = _Interval(started=clock())
        self._num_reports = 0
        self._average_over = (0, 0.0)  # tokens, seconds

    @property
    def average_tokens_per_second(self) -> float:
        """Tokens per second of all devices over all reports but the first, which is slow."""
        num_tokens, seconds = self._average_over
        return num_tokens / seconds if seconds else 0.0

    def start_interval(self) -> None:
        """Begin counting now: call right before the first step of a start."""
        self._interval = _Interval(started=self._clock())

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        before = self._clock()
        yield
        self._interval.waited_for_data += self._clock() - before

    def updating(self) -> AbstractContextManager[None]:
        """Count the time inside as this rank's own work on the update."""
        return nullcontext() if self._stragglers is None else self._stragglers.updating()

    def own_times(self) -> Sequence[torch.Tensor]:
        """Return what this rank did alone since the last report, for `report` to compare with what
        others did; nothing, if nobody looks for the slowest."""
        if self._stragglers is None:
            return ()
        interval = self._interval
        return self._stragglers.measure(
            data_seconds=interval.waited_for_data, num_steps=interval.num_steps
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out the time inside: saving a checkpoint is no training."""
        before = self._clock()
        yield
        self._interval.started += self._clock() - before

    def count(self, num_tokens: int) -> None:
        """Count a finished step of `num_tokens` tokens over all devices."""
        self._interval.num_steps += 1
        self._interval.num_tokens += num_tokens

    def report(
        self,
        step: int,
        *,
        figures: Mapping[str, torch.Tensor | float],
        own_times: Sequence[torch.Tensor] = (),
    ) -> Row:
        """Return the row of `step`: `figures` on the host, and the speed since the last report.

        `figures`: numbers, or vectors of them, on the device or not, already reduced over the
        ranks; a number that is not finite, a mean of nothing, becomes None. Added to them are
        tokens_per_second (all devices), tokens_per_second_per_device, tflops_per_device, mfu
        (percent of the peak of all devices; None without one), step_time_s and data_time_s (means
        over the interval) and memory_peak_gib (of this rank), and what is found in `own_times`, of
        each kind those of all ranks.
        """
        assert self._interval.num_steps > 0, "a report needs a step since the last one"
        own = {OWN: torch.stack(list(own_times), dim=1)} if own_times else {}
        values = _to_host({**figures, **own}, device=self._device)
        now = self._clock()  # after the copy: only then the device is done with the interval
        interval, self._interval = self._interval, _Interval(started=now)
        seconds = now - interval.started
        self._add_to_average(interval.num_tokens, seconds=seconds)
        per_device = interval.num_tokens / seconds / self._world_size
        flops = per_device * self._flops_per_token
        memory_gib = memory_peak_gib(self._device)
        reset_memory_peak(self._device)
        times = values.pop(OWN, None)
        slowest = {}
        if self._stragglers is not None and times is not None:
            of_ranks = [
                times[first : first + len(KINDS)] for first in range(0, len(times), len(KINDS))
            ]
            seconds_per_step = seconds / interval.num_steps
            slowest = self._stragglers.find(of_ranks, step=step, step_seconds=seconds_per_step)
        return {
            "step": step,
            **values,
            "tokens_per_second": interval.num_tokens / seconds,
            "tokens_per_second_per_device": per_device,
            "tflops_per_device": flops / 1e12,
            "mfu": None if self._peak_flops is None else 100 * flops / self._peak_flops,
            "step_time_s": seconds / interval.num_steps,
            "data_time_s": interval.waited_for_data / interval.num_steps,
            "memory_peak_gib": memory_gib,
            **slowest,
        }

    def _add_to_average(self, num_tokens: int, *, seconds: float) -> None:
        tokens_before, seconds_before = self._average_over
        if self._num_reports <= 1:  # the second report puts the first, slow one out of the average
            tokens_before, seconds_before = 0, 0.0
        self._average_over = (tokens_before + num_tokens, seconds_before + seconds)
        self._num_reports += 1


def _to_host(figures: Mapping[str, torch.Tensor | float], *, device: torch.device) -> Row:
    """Copy all tensors in one transfer; integers stay integers, float32 is exact in float64."""
    tensors = [value for value in figures.values() if isinstance(value, torch.Tensor)]
    flat = [tensor.detach().flatten().to(device, torch.float64) for tensor in tensors]
    copied = iter(torch.cat(flat).tolist() if flat else [])
    values: Row = {}
    for name, value in figures.items():
        if isinstance(value, torch.Tensor):
            kind = float if value.is_floating_point() else int
            numbers = [
                kind(number) if math.isfinite(number) else None
                for number in islice(copied, value.numel())
            ]
            values[name] = numbers[0] if len(numbers) == 1 else numbers
        else:
            values[name] = value
    return values


def build_meter(
    *,
    flops_per_token: float,
    dtype: torch.dtype,
    world_size: int,
    device: torch.device,
    stragglers: Stragglers | None,
) -> Meter:
    """Build the meter, and log what MFU is a percentage of: the mean peak of all ranks' devices."""
    peak = peak_flops(device, dtype=dtype)
    ours = torch.tensor(peak.value if peak else math.nan, dtype=torch.float64, device=device)
    mean = gather(ours).mean().item()  # not a number if any device's peak is unknown
    if peak is not None and math.isfinite(mean):
        logger.info("MFU: percent of %.4g TFLOP/s per device (%s)", mean / 1e12, peak.source)
    return Meter(
        flops_per_token=flops_per_token,
        peak_flops=mean if math.isfinite(mean) else None,
        world_size=world_size,
        device=device,
        stragglers=stragglers,
    )
