"""Profiler traces of training steps.

Of every `profile_freq` steps, torch's profiler records the last `profiler_active`, on all ranks at
the same time. Each rank writes its own file, which `chrome://tracing` and https://ui.perfetto.dev
display. Recording all steps would use ever more memory, and a profiler started by hand would miss
the slow step.
"""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan.metrics.snapshot import MemorySnapshots, check_memory_snapshot, write_complete

if TYPE_CHECKING:
    from torchtitan.metrics.settings import ProfilingConfig

logger = logging.getLogger(__name__)
_KINETO_SILENT = "6"


class Profiler:
    """Record traces. Recording starts at once; call `step` after each training step."""

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
            # Kineto prints two lines per trace; on a GPU its errors matter
            os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
        # each trace is written before the next one, and the warm-up is a setting
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
        """Mark the end of training step `step`; write the trace if the step is its last.

        Raises:
            DataError: The trace cannot be written.
        """
        self._step = step
        self._profile.step()
        self._step = None

    def close(self) -> None:
        """Stop recording. An incomplete trace is dropped."""
        self._profile.stop()
        if not self._num_written:
            logger.warning(
                "No step was profiled, because the run ended before step %d; use a smaller "
                "profiling.profile_freq",
                self._profile_freq,
            )

    def _write(self, trace: profile) -> None:
        if self._step is None:  # called by `close`: the trace is incomplete
            return
        path = self._folder / f"step-{self._step}" / f"rank_{self._rank}.json"
        write_complete(path, trace.export_chrome_trace, key="profiling.save_traces_folder")
        self._num_written += 1
        logger.info("Wrote the trace of step %d to %s", self._step, path)


Recorder = Profiler | MemorySnapshots
"""Records steps until it is closed."""


def build_recorders(
    settings: ProfilingConfig, *, folder: Path, rank: int, device: torch.device, step: int
) -> list[Recorder]:
    """Start what `settings` enable. `step` is the last one before.

    Raises:
        ConfigError: Memory snapshots need a GPU.
    """
    if settings.enable_memory_snapshot:
        check_memory_snapshot(device.type)
    recorders: list[Recorder] = []
    if settings.enable_profiling:
        recorders.append(Profiler(settings, folder=folder, rank=rank, device=device))
    if settings.enable_memory_snapshot:
        recorders.append(MemorySnapshots(settings, folder=folder, rank=rank, step=step))
    return recorders
