"""From steps to figures: what a logged step reports, and the speed since the last report.

Reading a number from a GPU makes the host wait, and a loop that waits in each step leaves the GPU
idle. So the loop passes device tensors, and only `Meter.report`, called at logged steps, copies
them to the host: all in one transfer, as float64, so that no digit is lost. When the copy arrives,
the device has finished all work of the interval, so the clock is read then.

Intervals last from `start_interval` to the first report, then from report to report. The first one
is usually step 1, including start-up and compilation, so it is left out of the average speed.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

import torch

from torchtitan.base.device import memory_peak_gib, peak_flops, reset_memory_peak
from torchtitan.mesh.ranks import gather
from torchtitan.metrics.rows import Row

logger = logging.getLogger(__name__)


@dataclass
class _Interval:
    """Counts since the last report; times in seconds."""

    started: float
    waited_for_data: float = 0.0
    num_steps: int = 0
    num_tokens: int = 0


class Meter:
    """Count steps, tokens and time, and turn them into a row of figures per report.

    `flops_per_token` is of forward and backward, for the entire model; `peak_flops` the mean peak
    per device in FLOP/s, None if unknown.
    """

    def __init__(
        self,
        *,
        flops_per_token: float,
        peak_flops: float | None,
        world_size: int,
        device: torch.device,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._flops_per_token = flops_per_token
        self._peak_flops = peak_flops
        self._world_size = world_size
        self._device = device
        self._clock = clock
        self._interval = _Interval(started=clock())
        self._first_speed: float | None = None
        self._num_tokens, self._seconds = 0, 0.0  # without the first interval

    @property
    def average_tokens_per_second(self) -> float:
        """Tokens per second of all devices, without the first interval if there are more."""
        if self._seconds:
            return self._num_tokens / self._seconds
        return self._first_speed or 0.0

    def start_interval(self) -> None:
        """Start counting now. Call this right before the first step of a start."""
        self._interval = _Interval(started=self._clock())

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Count the time inside as waiting for data."""
        before = self._clock()
        yield
        self._interval.waited_for_data += self._clock() - before

    def data_seconds(self) -> float:
        """Return the seconds per step that this rank waited for data since the last report."""
        return self._interval.waited_for_data / max(1, self._interval.num_steps)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude the time inside, such as a save or a validation."""
        before = self._clock()
        yield
        self._interval.started += self._clock() - before

    def count(self, num_tokens: int) -> None:
        """Count a finished step of `num_tokens` tokens over all devices."""
        self._interval.num_steps += 1
        self._interval.num_tokens += num_tokens

    def report(self, step: int, *, figures: Mapping[str, torch.Tensor | float]) -> Row:
        """Return the row of `step`, and start the next interval.

        The row has `figures`, tokens_per_second (all devices), tokens_per_second_per_device,
        tflops_per_device, mfu (percent of the peak; None if the peak is unknown), step_time_s and
        data_time_s (means of the interval) and memory_peak_gib (this rank).

        `figures` are scalars or vectors, reduced over ranks. Non-finite numbers become None.
        """
        assert self._interval.num_steps > 0, "a report needs a step since the last one"
        values = _to_host(figures, device=self._device)
        now = self._clock()  # after the copy, when the device has finished
        interval, self._interval = self._interval, _Interval(started=now)
        seconds = now - interval.started
        tokens_per_second = interval.num_tokens / seconds
        if self._first_speed is None:
            self._first_speed = tokens_per_second
        else:
            self._num_tokens += interval.num_tokens
            self._seconds += seconds
        flops = tokens_per_second / self._world_size * self._flops_per_token
        memory_gib = memory_peak_gib(self._device)
        reset_memory_peak(self._device)
        return {
            "step": step,
            **values,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / self._world_size,
            "tflops_per_device": flops / 1e12,
            "mfu": None if self._peak_flops is None else 100 * flops / self._peak_flops,
            "step_time_s": seconds / interval.num_steps,
            "data_time_s": interval.waited_for_data / interval.num_steps,
            "memory_peak_gib": memory_gib,
        }


def _to_host(figures: Mapping[str, torch.Tensor | float], *, device: torch.device) -> Row:
    """Copy all tensors in one transfer. Integers stay integers; float32 is exact in float64."""
    tensors = [value for value in figures.values() if isinstance(value, torch.Tensor)]
    flat = [tensor.detach().flatten().to(device, torch.float64) for tensor in tensors]
    copied = iter(torch.cat(flat).tolist() if flat else [])
    values: Row = {}
    for name, value in figures.items():
        if isinstance(value, torch.Tensor):
            number_type = float if value.is_floating_point() else int
            numbers = [
                number_type(number) if math.isfinite(number) else None
                for number in islice(copied, value.numel())
            ]
            values[name] = numbers[0] if len(numbers) == 1 else numbers
        else:
            values[name] = value
    return values


def build_meter(
    *, flops_per_token: float, dtype: torch.dtype, world_size: int, device: torch.device
) -> Meter:
    """Build the meter and log the peak that MFU refers to. Collective."""
    peak = peak_flops(device, dtype=dtype)
    own_peak = torch.tensor(peak.value if peak else math.nan, dtype=torch.float64, device=device)
    mean = gather(own_peak).mean().item()  # NaN if the peak of any device is unknown
    if peak is not None and math.isfinite(mean):
        logger.info("MFU: percent of %.4g TFLOP/s per device (%s)", mean / 1e12, peak.source)
    return Meter(
        flops_per_token=flops_per_token,
        peak_flops=mean if math.isfinite(mean) else None,
        world_size=world_size,
        device=device,
    )
