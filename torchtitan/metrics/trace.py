"""Traces of whole steps: what every rank did, and when, by torch's profiler.

Every `profile_freq` steps the last `profiler_active` of them are recorded, on all ranks at once,
and each rank writes its own file. `chrome://tracing` and https://ui.perfetto.dev draw it. A
profiler on all the time would cost memory without end, one started by hand would miss the step that
was slow.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan.base.errors import DataError

if TYPE_CHECKING:
    from torchtitan.metrics.settings import ProfilingConfig

logger = logging.getLogger(__name__)
_KINETO_SILENT = "6"


class Profiler:
    """Records steps while it is open; `step` is called after each of them."""

    def __init__(
        self, settings: ProfilingConfig, *, folder: Path, rank: int, device: torch.device
    ) -> None:
        self._folder = folder / settings.save_traces_folder
        self._rank = rank
        self._step: int | None = None
        self._num_written = 0
        self._profile_freq = settings.profile_freq
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:
            # torch's recorder writes two lines a trace to the console; on a GPU its errors matter
            os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
        # each trace is written before the next begins, and the settings say how long to warm up
        warnings.filterwarnings("ignore", message=".*Profiler (clears events|won't be using)")
        recorded = settings.profiler_warmup + settings.profiler_active
        self._profile = profile(
            activities=activities,
            schedule=schedule(
                wait=settings.profile_freq - recorded,
                warmup=settings.profiler_warmup,
                active=settings.profiler_active,
            ),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self, step: int) -> None:
        """Tell that training step number `step` is done; writes the trace that ends with it."""
        self._step = step
        self._profile.step()
        self._step = None

    def close(self) -> None:
        """Stop recording; a trace that is not complete is dropped."""
        self._profile.stop()
        if not self._num_written:
            logger.warning(
                "No step was profiled: the run ended before its step %d; lower "
                "profiling.profile_freq",
                self._profile_freq,
            )

    def _write(self, trace: profile) -> None:
        if self._step is None:  # stopped in the middle of it
            return
        folder = self._folder / f"step-{self._step}"
        path = folder / f"rank_{self._rank}.json"
        beside = path.with_suffix(".json.tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            trace.export_chrome_trace(str(beside))
            os.replace(beside, path)  # whoever looks for traces finds whole ones
        except OSError as error:
            raise DataError(
                f"profiling.save_traces_folder must be writable, {path} could not be written "
                f"({error.strerror}); make room, or set profiling.enable_profiling to false"
            ) from error
        self._num_written += 1
        logger.info("Wrote the trace of step %d to %s", self._step, path)


def build_profiler(
    settings: ProfilingConfig, *, folder: Path, rank: int, device: torch.device
) -> Profiler | None:
    """Start profiling into `folder`, where the settings ask for it."""
    if not settings.enable_profiling:
        return None
    return Profiler(settings, folder=folder, rank=rank, device=device)
