"""The events of a run: `events.jsonl`, a row per start, checkpoint, spike, end and failure.

Rank 0 appends rows and never removes any. After a resume from an earlier step, `metrics.jsonl` no
longer has the steps that are trained again, but the events still show that they existed. A killed
run has no end.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from pathlib import Path

from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.metrics.rows import Row, read_rows

logger = logging.getLogger(__name__)
EVENTS = "events.jsonl"
TEXTS = ("event", "time", "config", "layout", "folder", "figure", "action", "reason")


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hardware of a start."""

    resumed_from: int
    """Step of the loaded checkpoint; 0 for a new run."""
    world_size: int
    ranks_per_machine: int
    device: str
    """Product name of rank 0's device."""


class EventLog:
    """Append events to the file in `folder`. Each row has `event`, `step` and `time` (UTC)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / EVENTS
        self._ends_a_row = False

    def write(self, event: str, *, step: int, **facts: object) -> None:
        """Append a row and wait until it is on disk; raise CheckpointError if the file cannot be
        written."""
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = {"event": event, "time": now, "step": step, **facts}
        try:
            with self.path.open("a+b") as file:
                if not self._ends_a_row:  # a crash may have left half a row
                    file.seek(0)
                    file.truncate(file.read().rfind(b"\n") + 1)
                    self._ends_a_row = True
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"{self.path} cannot be written: {error.strerror or error}; make room and run the "
                f"same command to resume"
            ) from error

    def checkpoint(self, folder: Path, *, step: int) -> None:
        """Record a committed checkpoint."""
        self.write("checkpoint", step=step, folder=os.path.relpath(folder, self.path.parent))

    def spike(self, step: int, figure: str, value: float, bound: float, action: str) -> None:
        """Record a loss or norm above its bound, and what was done."""
        self.write("spike", step=step, figure=figure, value=value, bound=bound, action=action)

    def failure(self, step: int, error: BaseException) -> None:
        """Record an error that ends the run. If that fails too, log why."""
        first_line = next(iter(str(error).splitlines()), "")
        try:
            self.write("failure", step=step, reason=f"{type(error).__name__}: {first_line}")
        except CheckpointError as other:
            logger.error("%s", other)


def read_events(run: Path) -> list[Row]:
    """Return the events of a run, oldest first. Without a file the list is empty. Raises DataError
    if a row is damaged."""
    path = run / EVENTS
    rows = list(read_rows(path)) if path.exists() else []
    for row in rows:
        for key in TEXTS:
            if not isinstance(row.get(key, None if key in ("event", "time") else ""), str):
                raise DataError(f"{path}: {key!r} must be a text, got {row.get(key)!r:.60}")
    return rows


def newest_hardware(rows: Sequence[Row]) -> Hardware | None:
    """Return the hardware of the newest start, or None if no row has it.

    Figures after its `resumed_from` were measured on this hardware.
    """
    names = [field.name for field in fields(Hardware)]
    starts = [row for row in rows if row["event"] == "start"]
    if not starts:
        return None
    if missing := {*names} - starts[-1].keys():
        raise DataError(f"{EVENTS}: the last start lacks {', '.join(sorted(missing))}")
    return Hardware(**{name: starts[-1][name] for name in names})


def read_hardware(run: Path) -> Hardware:
    """Return the hardware of a run's newest start; raise DataError if the events are damaged or
    have no start."""
    hardware = newest_hardware(read_events(run))
    if hardware is None:
        raise DataError(f"{run / EVENTS} has no start with its hardware")
    return hardware
