"""What figures were measured on: `hardware.json`, written beside `metrics.jsonl` at each start.

A resumed run drops the rows beyond the step it resumes from, so the rows behind `resumed_from` are
those of the newest start, and one record is enough.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from torchtitan.base.errors import DataError
from torchtitan.base.files import read_text

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
        found = json.loads(read_text(path))
    except (OSError, ValueError, RecursionError) as error:
        raise DataError(
            f"{path} must hold what the run was started on, it cannot be read: {error}; give the "
            "job.dump_folder of a run of this version"
        ) from error
    return checked_hardware(found, place=path)


def checked_hardware(found: object, *, place: object) -> Hardware:
    """Return the record that was `found` in a file; raise DataError if it is none."""
    kinds = {"resumed_from": int, "world_size": int, "ranks_per_machine": int, "device": str}
    known = found if isinstance(found, dict) else {}
    is_record = {key: type(value) for key, value in known.items()} == kinds and all(
        (key != "resumed_from") <= n < 2**31 for key, n in known.items() if key != "device"
    )
    if not is_record:
        raise DataError(
            f"{place} must hold {', '.join(kinds)}: three whole numbers and a device's name, got "
            f"{str(found)[:100]}; restore it"
        )
    return Hardware(**known)
