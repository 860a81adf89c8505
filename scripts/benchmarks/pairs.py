"""Measure two ways to do the same in turn: A B A B.

On a busy machine the same work takes twice as long a minute later. So both ways take turns and each
pair gives one ratio: slow changes of the load affect both. The median ratio is the result, the
smallest and the largest show how far to trust it. The first pair warms up and is not counted.

A ratio means nothing unless both ways computed the same. Each command compares their results first
(`check_close`) and stops if they differ.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from torchtitan.base.errors import ConfigError, UserError

WIDTH = 110
ELAPSED, PROCESSOR = CLOCKS = ("elapsed", "processor")

Spent = dict[str, float]
"""Seconds by each of `CLOCKS`."""


class DisagreementError(UserError):
    """The two ways did not compute the same, so their times cannot be compared."""

    exit_code = 1


@dataclass(frozen=True)
class Comparison:
    """Seconds of two ways to do the same, pair by pair."""

    name: str
    target: str
    ours_s: list[float]
    other_s: list[float]
    amount: float = 0.0
    """Units that one measurement processes, to compute a speed; 0 if only the time matters."""
    unit: str = ""

    @property
    def ratios(self) -> list[float]:
        """Our time over the other, per pair."""
        return [ours / other for ours, other in zip(self.ours_s, self.other_s, strict=True)]

    def figures(self) -> dict[str, Any]:
        """Return all fields and ratios as plain values."""
        values = asdict(self) | {"ratios": self.ratios, "ratio": statistics.median(self.ratios)}
        if self.amount:
            values["ours_per_second"] = self.amount / statistics.median(self.ours_s)
            values["other_per_second"] = self.amount / statistics.median(self.other_s)
        return values


@dataclass(frozen=True, kw_only=True)
class Report:
    """The result of a command."""

    about: Mapping[str, Any]
    """Sizes, device and versions."""
    comparisons: Sequence[Comparison]
    notes: Sequence[str] = ()
    """Agreement of results, memory, and peers that were skipped."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Figures other than times, for JSON."""
    has_failed: bool = False
    """Whether a check failed, so that the command ends with exit code 1."""


def compare_times(
    name: str,
    target: str,
    ours: Sequence[Spent],
    other: Sequence[Spent],
    *,
    clocks: Sequence[str] = CLOCKS,
    amount: float = 0.0,
    unit: str = "",
) -> list[Comparison]:
    """Return a comparison per clock. `amount` applies to elapsed time."""
    return [
        Comparison(
            f"{name}, {clock}",
            target,
            [each[clock] for each in ours],
            [each[clock] for each in other],
            amount if clock == ELAPSED else 0.0,
            unit,
        )
        for clock in clocks
    ]


def alternate(
    name: str,
    target: str,
    ours: Callable[[], Spent],
    other: Callable[[], Spent],
    *,
    num_pairs: int,
    clocks: Sequence[str] = CLOCKS,
    amount: float = 0.0,
    unit: str = "",
) -> list[Comparison]:
    """Run both ways in turn and return a comparison per clock. The first pair is not counted."""
    times = [(ours(), other()) for _ in range(num_pairs + 1)][1:]
    ours_s, other_s = [a for a, _ in times], [b for _, b in times]
    return compare_times(name, target, ours_s, other_s, clocks=clocks, amount=amount, unit=unit)


def read_clocks() -> Spent:
    """Return the time of each clock once the device is idle."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return {ELAPSED: time.perf_counter(), PROCESSOR: time.process_time()}


def spent_since(start: Spent) -> Spent:
    """Return the seconds since `start`."""
    now = read_clocks()
    return {clock: now[clock] - start[clock] for clock in CLOCKS}


def timed(action: Callable[[], object]) -> Spent:
    """Return the seconds that an action takes, including work queued on a GPU."""
    start = read_clocks()
    action()
    return spent_since(start)


def check_close(
    what: str, ours: Sequence[float], other: Sequence[float], *, tolerance: float
) -> float:
    """Return the largest relative difference between two rows of figures.

    Raises:
        DisagreementError: It exceeds the tolerance, or the rows have different or no lengths.
    """
    if not ours or len(ours) != len(other):
        raise DisagreementError(f"{what}: cannot compare {len(ours)} figures with {len(other)}")
    gaps = [abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(ours, other, strict=True)]
    # not `gap > tolerance`, which is false for NaN
    if not all(gap <= tolerance for gap in gaps):
        place = next(i for i, gap in enumerate(gaps) if not gap <= tolerance)
        raise DisagreementError(
            f"{what} must agree within {tolerance:g}, got {ours[place]!r} and {other[place]!r} "
            f"at index {place}; no ratio is printed"
        )
    return max(gaps)


def show(report: Report) -> None:
    """Print medians, and the ratio of times with its spread over the pairs."""
    about = ", ".join(f"{name} {value}" for name, value in report.about.items())
    num_pairs = len(report.comparisons[0].ours_s) if report.comparisons else 0
    console = Console(width=WIDTH, highlight=False)
    pairs = f"; medians of {num_pairs} pairs" if num_pairs else ""
    console.print(f"{about}{pairs}", markup=False)
    rows = [["", "ours", "other", "ratio", "spread", "target"]]
    for each in report.comparisons:
        ours, other = statistics.median(each.ours_s), statistics.median(each.other_s)
        spread = f"{min(each.ratios):.2f} to {max(each.ratios):.2f}"
        ratio = f"{statistics.median(each.ratios):.3f}"
        rows.append([each.name, f"{ours:.3f} s", f"{other:.3f} s", ratio, spread, each.target])
        if each.amount:
            speeds = [f"{each.amount / ours:,.0f}", f"{each.amount / other:,.0f}"]
            rows.append([f"  {each.unit} per second", *speeds, "", "", ""])
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in rows[0]:
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    for cells in rows[1:]:
        table.add_row(*cells)
    if num_pairs:
        console.print(table)
    for note in report.notes:
        console.print(f"- {note}", markup=False)


def write_json(report: Report, path: Path) -> None:
    """Write every measured time and all other figures."""
    rows = [each.figures() for each in report.comparisons]
    values = dict(report.about) | {"comparisons": rows, "notes": list(report.notes)}
    path.write_text(json.dumps(values | dict(report.more), indent=1), encoding="utf-8")


def read_measured(file: Path | None, *, about: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return what an earlier call wrote to --out under "measured"; raise ConfigError if its `about`
    differs."""
    if file is None or not file.exists():
        return {}
    found = json.loads(file.read_text(encoding="utf-8"))
    if different := [key for key, value in about.items() if found.get(key) != value]:
        raise ConfigError(f"--out {file} holds figures of another {', '.join(different)}")
    measured: dict[str, dict[str, Any]] = found["measured"]
    return measured
