"""What was done to a run: `ledger.jsonl`, a row for each start, change, checkpoint, spike and end.

Rows are only ever appended, by rank 0. Metrics of steps that a start goes back behind are dropped;
the ledger keeps that they were there. A run that is killed has no row of its end, and a checkpoint
has its row as soon as it is whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Protocol

import torch
import torchdata

import torchtitan
from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.config.sources import flatten, parse
from torchtitan.metrics.rows import Row, read_rows

logger = logging.getLogger(__name__)
LEDGER = "ledger.jsonl"
SECONDS_FOR_GIT = 20
_KINDS = {
    **dict.fromkeys(("event", "time", "layout", "config", "folder", "setting", "reason"), str),
    **dict.fromkeys(("figure", "action", "manifest_sha256"), str),
    **{"world_size": int, "hardware": dict, "versions": dict, "git": dict},
}
"""Types of what tools read of rows."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """What a start of a run ran on."""

    resumed_from: int
    """The step that was loaded; 0 for a new run."""
    world_size: int
    ranks_per_machine: int
    device: str
    """The product name of rank 0's device."""


class Stepping(Protocol):
    """What knows the last step."""

    step: int


class Ledger:
    """Appends rows to a run's ledger.

    `step` and `time`, in UTC, are in each row; what else is there `write` is told by its caller.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER

    def write(self, event: str, *, step: int, **facts: object) -> None:
        """Append a row, which is on disk when this returns.

        Raises:
            CheckpointError: The disk does not take it.
        """
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        row = {"event": event, "time": now, "step": step, **facts}
        try:
            with self.path.open("ab") as file:
                file.write(json.dumps(row).encode() + b"\n")
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise CheckpointError(
                f"{self.path} must be writable all along, got: {error.strerror or error}; make "
                f"room or mend it, and start again, checkpoints are untouched"
            ) from error

    def start(self, step: int, *, config: str, layout: str, **facts: object) -> None:
        """Record a start, and each setting that is not as at the start before.

        `config`: the resolved settings, as TOML.

        Raises:
            CheckpointError: The disk does not take the rows.
            DataError: The file is damaged.
        """
        before = next((row for row in reversed(self._mended()) if row["event"] == "start"), None)
        self.write(
            "start",
            step=step,
            layout=layout,
            config=config,
            command=sys.orig_argv,
            folder=os.getcwd(),
            versions=_versions(),
            git=dict(_git_states()),
            **facts,
        )
        now = _settings(config, layout=layout)
        then = now if before is None else _settings(before["config"], layout=before["layout"])
        for key in {**then, **now}:
            old, new = then.get(key), now.get(key)
            if old != new:
                self.write("change", step=step, setting=key, old=old, new=new)

    def checkpoint(self, folder: Path, *, step: int) -> None:
        """Record a checkpoint that is whole, with the hash of its manifest."""
        place = os.path.relpath(folder, self.path.parent)
        self.write("checkpoint", step=step, folder=place, manifest_sha256=hash_manifest(folder))

    def spike(self, step: int, figure: str, value: float, bound: float, action: str) -> None:
        """Record a loss or norm above its bound, and what was done."""
        self.write("spike", step=step, figure=figure, value=value, bound=bound, action=action)

    def end(self, step: int, reason: str) -> None:
        """Record that the run is over, or stopped for a reason."""
        self.write("end", step=step, reason=reason)

    @contextmanager
    def recording_failure(self, progress: Stepping) -> Iterator[None]:
        """Record the end too if it is an error, which is raised as it was."""
        try:
            yield
        except BaseException as error:
            said = str(error).splitlines() or [""]
            try:
                self.end(progress.step, f"{type(error).__name__}: {said[0]}")
            except CheckpointError as other:
                logger.error("%s", other)
            raise

    def _mended(self) -> Sequence[Row]:
        """Return all rows; a last one that a crash has torn is cut off."""
        if not self.path.exists():
            return []
        rows = read_ledger(self.path.parent)
        content = self.path.read_bytes()
        if content and not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)
        return rows


def read_ledger(run: Path) -> list[Row]:
    """Return the rows of a run's ledger, oldest first; none of a run that has no ledger.

    Raises:
        DataError: A row is damaged.
    """
    path = run / LEDGER
    rows = read_rows(path) if path.exists() else []
    for row in rows:
        for key in ("event", "time"):
            row[key]
        for key, kind in _KINDS.items():
            if key in row and not isinstance(row[key], kind):
                raise DataError(
                    f"{path}: {key!r} of a row {row['event']!r:.20} must be of type "
                    f"{kind.__name__}, got {str(row[key])[:60]!r}; restore the file"
                )
        if "hardware" in row:
            _check_hardware(row["hardware"], place=path)
    return rows


def newest_hardware(rows: Sequence[Row]) -> Hardware | None:
    """Return what the newest start ran on; None if the rows do not have it.

    A resumed run drops the figures beyond the step it resumes from, so those behind `resumed_from`
    were measured on this hardware.
    """
    starts = (row for row in reversed(rows) if row["event"] == "start" and "hardware" in row)
    newest = next(starts, None)
    return None if newest is None else Hardware(**newest["hardware"])


def read_hardware(run: Path) -> Hardware:
    """Return what a run's newest start ran on; raise DataError if its ledger does not have it."""
    found = newest_hardware(read_ledger(run))
    if found is None:
        raise DataError(f"{run / LEDGER} must have a start with its hardware, got none")
    return found


def _check_hardware(found: dict[str, Any], *, place: Path) -> None:
    kinds = {"resumed_from": int, "world_size": int, "ranks_per_machine": int, "device": str}
    is_record = {key: type(value) for key, value in found.items()} == kinds and all(
        (key != "resumed_from") <= n < 2**31 for key, n in found.items() if key != "device"
    )
    if not is_record:
        raise DataError(
            f"{place} must hold {', '.join(kinds)}: three whole numbers and a device's name, got "
            f"{str(found)[:100]}; restore it"
        )


def hash_manifest(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which holds the checksums of all its files."""
    return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()


def _settings(config: str, *, layout: str) -> dict[str, Any]:
    flat = flatten(parse(config, origin=LEDGER), origin=LEDGER)
    return {"layout": layout} | {".".join(key): one.value for key, one in flat.items()}


def _versions() -> dict[str, str]:
    found = {
        "python": platform.python_version(),
        "torchtitan": torchtitan.__version__,
        "torch": torch.__version__,
        "torchdata": torchdata.__version__,
    }
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    return found


def _git_states() -> Iterator[tuple[str, dict[str, Any] | None]]:
    """Yield the state of the checkouts of the library and of the current folder; None: no git."""
    for name, folder in (("torchtitan", Path(__file__).parents[1]), ("here", Path.cwd())):
        try:
            commit = _git(folder, "rev-parse", "HEAD").decode().strip()
            diff = _git(folder, "diff", "HEAD", "--binary")
        except (OSError, subprocess.SubprocessError):
            yield name, None
        else:
            # what is not in the commit; of files that git does not follow it knows nothing
            changes = hashlib.sha256(diff).hexdigest() if diff else None
            yield name, {"commit": commit, "diff_sha256": changes}


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        check=True,
        timeout=SECONDS_FOR_GIT,
    ).stdout
