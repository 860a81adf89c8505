"""The ledger of a run: `ledger.jsonl`, a row per start, change, checkpoint, spike and end.

Rank 0 appends rows and never removes any. After a resume from an earlier step, `metrics.jsonl` no
longer has the steps that are trained again, but the ledger still shows that they existed. A killed
run has no end row. A checkpoint's row is written after its commit.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

import torchtitan
from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.config.sources import flatten, parse
from torchtitan.metrics.rows import Row, read_rows

logger = logging.getLogger(__name__)
LEDGER = "ledger.jsonl"
GIT_TIMEOUT_SECONDS = 20
_TYPES = {
    **dict.fromkeys(("event", "time", "layout", "config", "folder", "setting", "reason"), str),
    **dict.fromkeys(("figure", "action", "manifest_sha256"), str),
    **{"world_size": int, "hardware": dict, "versions": dict, "git": dict},
}
"""Types of the values that tools read."""


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Hardware of a start."""

    resumed_from: int
    """Step of the loaded checkpoint; 0 for a new run."""
    world_size: int
    ranks_per_machine: int
    device: str
    """Product name of rank 0's device."""


class Ledger:
    """Append rows to the ledger in `folder`. Each row has `event`, `step` and `time` (UTC)."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / LEDGER

    def write(self, event: str, *, step: int, **facts: object) -> None:
        """Append a row and wait until it is on disk.

        Raises:
            CheckpointError: The file cannot be written.
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
                f"{self.path} cannot be written: {error.strerror or error}; make room and run the "
                f"same command to resume"
            ) from error

    def start(self, step: int, *, config: str, layout: str, **facts: object) -> None:
        """Record a start, and a change for each setting that differs from the previous start.

        Args:
            step: Step from which training starts.
            config: Resolved settings, as TOML.
            layout: Degrees of parallelism, as text.
            facts: Further entries of the start's row.

        Raises:
            CheckpointError: The file cannot be written.
            DataError: The file is damaged.
        """
        starts = [row for row in self._read_and_repair() if row["event"] == "start"]
        self.write(
            "start",
            step=step,
            layout=layout,
            config=config,
            command=sys.orig_argv,
            folder=os.getcwd(),
            versions=_versions(),
            git=_git_states(),
            **facts,
        )
        if not starts:
            return
        now = _settings(config, layout=layout)
        then = _settings(starts[-1]["config"], layout=starts[-1]["layout"])
        for key in {**then, **now}:
            old, new = then.get(key), now.get(key)
            if old != new:
                self.write("change", step=step, setting=key, old=old, new=new)

    def checkpoint(self, folder: Path, *, step: int) -> None:
        """Record a committed checkpoint and the hash of its manifest."""
        relative = os.path.relpath(folder, self.path.parent)
        self.write("checkpoint", step=step, folder=relative, manifest_sha256=hash_manifest(folder))

    def spike(self, step: int, figure: str, value: float, bound: float, action: str) -> None:
        """Record a loss or norm above its bound, and what was done."""
        self.write("spike", step=step, figure=figure, value=value, bound=bound, action=action)

    def end(self, step: int, reason: str) -> None:
        """Record the end of the run."""
        self.write("end", step=step, reason=reason)

    def record_failure(self, step: int, error: BaseException) -> None:
        """Record an error that ends the run. If that fails too, log why."""
        first_line = next(iter(str(error).splitlines()), "")
        try:
            self.end(step, f"{type(error).__name__}: {first_line}")
        except CheckpointError as other:
            logger.error("%s", other)

    def _read_and_repair(self) -> list[Row]:
        """Return all rows; truncate an incomplete last line, left by a crash."""
        rows = read_ledger(self.path.parent)
        content = self.path.read_bytes() if self.path.exists() else b""
        if content and not content.endswith(b"\n"):
            os.truncate(self.path, content.rfind(b"\n") + 1)
        return rows


def read_ledger(run: Path) -> list[Row]:
    """Return the rows of a run's ledger, oldest first. Without a ledger the list is empty.

    Raises:
        DataError: A row is damaged.
    """
    path = run / LEDGER
    rows = list(read_rows(path)) if path.exists() else []
    for row in rows:
        for key in ("event", "time"):
            row[key]
        for key, kind in _TYPES.items():
            if key in row and not isinstance(row[key], kind):
                raise DataError(
                    f"{path}: {key!r} in a row {row['event']!r:.20} must be of type "
                    f"{kind.__name__}, got {str(row[key])[:60]!r}; restore the file"
                )
        if "hardware" in row:
            _check_hardware(row["hardware"], path=path)
    return rows


def newest_hardware(rows: Sequence[Row]) -> Hardware | None:
    """Return the hardware of the newest start, or None if no row has it.

    Figures after its `resumed_from` were measured on this hardware.
    """
    starts = [row for row in rows if row["event"] == "start" and "hardware" in row]
    return Hardware(**starts[-1]["hardware"]) if starts else None


def read_hardware(run: Path) -> Hardware:
    """Return the hardware of a run's newest start.

    Raises:
        DataError: The ledger is damaged or has no hardware.
    """
    found = newest_hardware(read_ledger(run))
    if found is None:
        raise DataError(f"{run / LEDGER} has no start with its hardware")
    return found


def _check_hardware(found: dict[str, Any], *, path: Path) -> None:
    types = {"resumed_from": int, "world_size": int, "ranks_per_machine": int, "device": str}
    is_valid = {key: type(value) for key, value in found.items()} == types and all(
        (key != "resumed_from") <= n < 2**31 for key, n in found.items() if key != "device"
    )
    if not is_valid:
        raise DataError(
            f"{path}: hardware must have {', '.join(types)} (three integers and a name), got "
            f"{str(found)[:100]}; restore the file"
        )


def hash_manifest(checkpoint: Path) -> str:
    """Return the SHA-256 of a checkpoint's manifest, which has the checksums of all its files."""
    return hashlib.sha256((checkpoint / "manifest.json").read_bytes()).hexdigest()


def _settings(config: str, *, layout: str) -> dict[str, Any]:
    flat = flatten(parse(config, origin=LEDGER), origin=LEDGER)
    return {"layout": layout} | {".".join(key): one.value for key, one in flat.items()}


def _versions() -> dict[str, str]:
    versions = {
        "python": platform.python_version(),
        "torchtitan": torchtitan.__version__,
        "torch": torch.__version__,
    }
    if torch.version.cuda:
        versions["CUDA"] = torch.version.cuda
    return versions


def _git_states() -> dict[str, dict[str, Any] | None]:
    """Return the state of the library's checkout and of the current folder's; None without git."""
    folders = {"torchtitan": Path(__file__).parents[1], "here": Path.cwd()}
    states: dict[str, dict[str, Any] | None] = {}
    for name, folder in folders.items():
        try:
            commit = _git(folder, "rev-parse", "HEAD").decode().strip()
            diff = _git(folder, "diff", "HEAD", "--binary")  # without untracked files
        except (OSError, subprocess.SubprocessError):
            states[name] = None
        else:
            changes = hashlib.sha256(diff).hexdigest() if diff else None
            states[name] = {"commit": commit, "diff_sha256": changes}
    return states


def _git(folder: Path, *arguments: str) -> bytes:
    return subprocess.run(
        ["git", "-C", str(folder), *arguments],
        capture_output=True,
        check=True,
        timeout=GIT_TIMEOUT_SECONDS,
    ).stdout
