"""Profiler traces of training steps, and snapshots of the GPU memory allocator.

Of every `profile_freq` steps, torch's profiler records the last `profiler_active`, on all ranks at
the same time. Each rank writes its own file, which `chrome://tracing` and https://ui.perfetto.dev
display. Recording all steps would use ever more memory.

Snapshots are for https://docs.pytorch.org/memory_viz. torch's allocator records its last
`MAX_ENTRIES` allocations and frees with their stacks. They are written every `profile_freq` steps,
and when the device runs out of memory, which shows what filled it.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch.profiler import ProfilerActivity, profile, schedule

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.metrics.rows import convert_os_errors

if TYPE_CHECKING:
    from torchtitan.metrics.settings import ProfilingConfig

logger = logging.getLogger(__name__)
_KINETO_SILENT = "6"
MAX_ENTRIES = 100_000


class Profiler:
    """Record traces. Recording starts at once; call `step` after each training step."""

    def __init__(
        self, settings: ProfilingConfig, *, folder: Path, rank: int, device: torch.device
    ) -> None:
        self._folder, self._rank = folder / settings.save_traces_folder, rank
        self._step: int | None = None
        self._num_written, self._profile_freq = 0, settings.profile_freq
        activities = [ProfilerActivity.CPU]
        if device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        else:  # Kineto prints two lines per trace; on a GPU its errors matter
            os.environ.setdefault("KINETO_LOG_LEVEL", _KINETO_SILENT)
        # each trace is written before the next one, and the warm-up is a setting
        warnings.filterwarnings("ignore", message=".*Profiler (clears events|won't be using)")
        warmup, active = settings.profiler_warmup, settings.profiler_active
        wait = settings.profile_freq - warmup - active
        self._profile = profile(
            activities=activities,
            schedule=schedule(wait=wait, warmup=warmup, active=active),
            on_trace_ready=self._write,
        )
        self._profile.start()

    def step(self, step: int) -> None:
        """Mark the end of training step `step`; write the trace if the step is its last; raise
        DataError if the trace cannot be written."""
        self._step = step
        self._profile.step()
        self._step = None

    def close(self) -> None:
        """Stop recording. An incomplete trace is dropped."""
        self._profile.stop()
        if not self._num_written:
            text = "No step was profiled: the run ended before step %d (profiling.profile_freq)"
            logger.warning(text, self._profile_freq)

    def _write(self, trace: profile) -> None:
        if self._step is None:  # called by `close`: the trace is incomplete
            return
        path = self._folder / f"step-{self._step}" / f"rank_{self._rank}.json"
        write_complete(path, trace.export_chrome_trace)
        self._num_written += 1
        logger.info("Wrote the trace of step %d to %s", self._step, path)


class MemorySnapshots:
    """Record allocations from now on; call `step` after each training step."""

    def __init__(self, settings: ProfilingConfig, *, folder: Path, rank: int, step: int) -> None:
        self._folder, self._rank = folder / settings.save_memory_snapshot_folder, rank
        self._profile_freq, self._step = settings.profile_freq, step
        self._is_open = True
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(self._write_out_of_memory)

    def step(self, step: int) -> None:
        """Mark the end of training step `step`; write a snapshot if one is due; raise DataError if
        the snapshot cannot be written."""
        self._step = step
        if step % self._profile_freq == 0:
            self._write(f"iteration_{step}")

    def close(self) -> None:
        """Stop recording. The observer of the allocator stays, and does nothing."""
        self._is_open = False
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write_out_of_memory(self, *_: int) -> None:
        """Called by the allocator before it raises, so that nothing is freed yet."""
        if self._is_open:
            try:
                self._write(f"iteration_{self._step + 1}_exit")
            except DataError as error:  # must not replace the error of the allocator
                logger.warning("%s", error)

    def _write(self, name: str) -> None:
        path = self._folder / name / f"rank_{self._rank}_memory_snapshot.pickle"
        write_complete(path, torch.cuda.memory._dump_snapshot)
        logger.info("Wrote a memory snapshot to %s", path)


def write_complete(path: Path, write: Callable[[str], object]) -> None:
    """Call `write` with a temporary name, and rename the file: readers never see a partial one;
    raise DataError if the file cannot be written."""
    temporary = path.with_name(f"{path.name}.tmp")
    with convert_os_errors(str(path)):
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(temporary))
        os.replace(temporary, path)


Recorder = Profiler | MemorySnapshots
"""Records steps until it is closed."""


def build_recorders(
    settings: ProfilingConfig, *, folder: Path, rank: int, device: torch.device, step: int
) -> list[Recorder]:
    """Start what `settings` enable. `step` is the last one before; raise ConfigError if memory
    snapshots need a GPU."""
    if settings.enable_memory_snapshot and device.type != "cuda":
        raise ConfigError.at(
            "profiling.enable_memory_snapshot", f"needs a GPU, got the device {device.type!r}"
        )
    recorders: list[Recorder] = []
    if settings.enable_profiling:
        recorders.append(Profiler(settings, folder=folder, rank=rank, device=device))
    if settings.enable_memory_snapshot:
        recorders.append(MemorySnapshots(settings, folder=folder, rank=rank, step=step))
    return recorders
