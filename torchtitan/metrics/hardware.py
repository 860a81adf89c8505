"""What figures were measured on: `hardware.json`, written beside `metrics.jsonl` at each start.

A resumed run drops the rows beyond the step it resumes from, so the rows behind `resumed_from` are
those of the newest start, and one record is enough.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan.base.errors import DataError

HARDWARE_FILE = "hardware.json"


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What the newest start of a run ran on."""

    resumed_from: int
    """The step that was loaded; 0 for a new run."""
    world_size: int
    ranks_per_machine: int
    device: str
    """The product name of rank 0's device."""


def write_hardware(folder: Path, hardware: Hardware) -> None:
    """Write the record of a start; raise DataError if that is not possible."""
    path = folder / HARDWARE_FILE
    try:
        path.write_text(json.dumps(asdict(hardware)) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"{path} must be a file this run can write, it cannot be written: {error.strerror}; "
            "move away what is there"
        ) from error


def read_hardware(folder: Path) -> Hardware:
    """Return the record of a run's newest start; raise DataError if there is none."""
    path = folder / HARDWARE_FILE
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        hardware = Hardware(**found)
    except (OSError, ValueError, TypeError) as error:
        raise DataError(
            f"{path} must hold what the run was started on, it cannot be read: {error}; give the "
            "job.dump_folder of a run of this version"
        ) from error
    numbers = (hardware.resumed_from, hardware.world_size, hardware.ranks_per_machine)
    if not all(type(n) is int for n in numbers) or not isinstance(hardware.device, str):
        raise DataError(
            f"{path} must hold three whole numbers and a device's name, got {found}; restore it"
        )
    return hardware
