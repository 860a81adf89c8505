"""Snapshots of the GPU memory allocator, for https://docs.pytorch.org/memory_viz.

Once the model is built, torch's allocator records its last `MAX_ENTRIES` allocations and frees with
their stacks. They are written every `profile_freq` steps, and when the device runs out of memory,
which shows what filled it. The recording needs host memory and slows the host. Results do not
change.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from torchtitan.base.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torchtitan.metrics.settings import ProfilingConfig

logger = logging.getLogger(__name__)
MAX_ENTRIES = 100_000


def check_memory_snapshot(device_type: str) -> None:
    """Check that the device is a GPU, whose allocator can record.

    Raises:
        ConfigError: The device is not a GPU.
    """
    if device_type != "cuda":
        raise ConfigError.at(
            "profiling.enable_memory_snapshot", f"needs a GPU, got the device {device_type!r}"
        )


class MemorySnapshots:
    """Record allocations from now on; call `step` after each training step."""

    def __init__(self, settings: ProfilingConfig, *, folder: Path, rank: int, step: int) -> None:
        self._folder = folder / settings.save_memory_snapshot_folder
        self._rank = rank
        self._profile_freq = settings.profile_freq
        self._step = step
        self._is_open = True
        torch.cuda.memory._record_memory_history(stacks="python", max_entries=MAX_ENTRIES)
        torch._C._cuda_attach_out_of_memory_observer(self._write_out_of_memory)

    def step(self, step: int) -> None:
        """Mark the end of training step `step`; write a snapshot if one is due.

        Raises:
            DataError: The snapshot cannot be written.
        """
        self._step = step
        if step % self._profile_freq == 0:
            self._write(f"iteration_{step}")

    def close(self) -> None:
        """Stop recording. The observer of the allocator stays, and does nothing."""
        self._is_open = False
        torch.cuda.memory._record_memory_history(enabled=None)

    def _write_out_of_memory(self, *_: int) -> None:
        """Called by the allocator before it raises, so that nothing is freed yet."""
        if not self._is_open:
            return
        try:
            self._write(f"iteration_{self._step + 1}_exit")
        except DataError as error:  # must not replace the error of the allocator
            logger.warning("%s", error)

    def _write(self, name: str) -> None:
        path = self._folder / name / f"rank_{self._rank}_memory_snapshot.pickle"
        write_complete(
            path, torch.cuda.memory._dump_snapshot, key="profiling.save_memory_snapshot_folder"
        )
        logger.info("Wrote a memory snapshot to %s", path)


def write_complete(path: Path, write: Callable[[str], object], *, key: str) -> None:
    """Call `write` with a temporary name, and rename the file: readers never see a partial one.

    Args:
        path: The file. Its folder is created.
        write: Writes the file of a name.
        key: Setting of the folder.

    Raises:
        DataError: The file cannot be written.
    """
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write(str(temporary))
        os.replace(temporary, path)
    except OSError as error:
        raise DataError(f"{key} must be writable, got {path}: {error.strerror}") from error
