"""Two ways to do the same, measured in turn: A B A B.

On a machine with neighbours the same work takes twice as long a minute later. So the two ways take
turns and each pair gives one ratio; whatever comes and goes slowly meets both. The middle one of
the ratios is the figure, the smallest and the largest say how far to trust it. The first pair,
which finds no memory and no files, is not counted.

A ratio means nothing unless both did the same. Each command compares results first (`check_close`)
and stops where they differ, before a figure is shown.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from torchtitan.base.errors import UserError

WIDTH = 110
CLOCKS = ("elapsed", "processor")

Spent = dict[str, float]
"""Seconds by each of `CLOCKS`."""

Turn = TypeVar("Turn")


class DisagreementError(UserError):
    """The two ways did not compute the same, so their times compare nothing."""

    exit_code = 1


@dataclass(frozen=True)
class Comparison:
    """Seconds of two ways to do the same, pair by pair."""

    name: str
    target: str
    ours_s: list[float]
    other_s: list[float]
    amount: float = 0.0
    """What one measurement gets done, in `unit`: gives the speeds; 0 where only time matters."""
    unit: str = ""

    @property
    def ratios(self) -> list[float]:
        """Ours over the other, of each pair; of times."""
        return [ours / other for ours, other in zip(self.ours_s, self.other_s, strict=True)]

    def figures(self) -> dict[str, Any]:
        """Return everything as plain values."""
        values = asdict(self) | {"ratios": self.ratios, "ratio": statistics.median(self.ratios)}
        if self.amount:
            values["ours_per_second"] = self.amount / statistics.median(self.ours_s)
            values["other_per_second"] = self.amount / statistics.median(self.other_s)
        return values


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a command found."""

    about: Mapping[str, Any]
    """What was measured, and on what."""
    comparisons: Sequence[Comparison]
    notes: Sequence[str] = ()
    """What the figures cannot say: what agreed, and what was left out and why."""
    more: Mapping[str, Any] = field(default_factory=dict)
    """Figures that are no times."""
    tables: Mapping[str, Sequence[Sequence[str]]] = field(default_factory=dict)
    """The same to be read: by title rows, the first of which names the columns."""


def alternate(
    name: str,
    target: str,
    ours: Callable[[], float],
    other: Callable[[], float],
    *,
    num_pairs: int,
    amount: float = 0.0,
    unit: str = "",
) -> Comparison:
    """Let both measure themselves in turn, after one pair that is not counted."""
    pairs = _pairs(ours, other, num_pairs)
    return Comparison(name, target, [a for a, _ in pairs], [b for _, b in pairs], amount, unit)


def alternate_by_clocks(
    name: str,
    target: str,
    ours: Callable[[], Spent],
    other: Callable[[], Spent],
    *,
    num_pairs: int,
) -> list[Comparison]:
    """Do as `alternate`, and compare by each of `CLOCKS`."""
    pairs = _pairs(ours, other, num_pairs)
    return [
        Comparison(
            f"{name}, {clock}", target, [a[clock] for a, _ in pairs], [b[clock] for _, b in pairs]
        )
        for clock in CLOCKS
    ]


def _pairs(
    ours: Callable[[], Turn], other: Callable[[], Turn], num_pairs: int
) -> list[tuple[Turn, Turn]]:
    ours(), other()
    return [(ours(), other()) for _ in range(num_pairs)]


def read_clocks() -> Spent:
    """Return what each clock shows, once the device has done its work."""
    synchronize()
    return {"elapsed": time.perf_counter(), "processor": time.process_time()}


def spent_since(start: Spent) -> Spent:
    """Return the seconds since `start`."""
    now = read_clocks()
    return {clock: now[clock] - start[clock] for clock in CLOCKS}


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes, work still queued on a GPU included."""
    synchronize()
    start = time.perf_counter()
    action()
    synchronize()
    return time.perf_counter() - start


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def check_close(
    what: str, ours: Sequence[float], other: Sequence[float], *, tolerance: float
) -> float:
    """Return the largest relative gap between two rows of figures.

    Raises:
        DisagreementError: It exceeds the tolerance, or there is nothing to compare.
    """
    if not ours or len(ours) != len(other):
        raise DisagreementError(
            f"{what}: {len(ours)} figures cannot be compared with {len(other)}; no ratio is given"
        )
    gaps = [abs(a - b) / max(abs(a), abs(b), 1e-30) for a, b in zip(ours, other, strict=True)]
    # not `gap > tolerance`: that holds of no NaN
    if not all(gap <= tolerance for gap in gaps):
        place = next(i for i, gap in enumerate(gaps) if not gap <= tolerance)
        raise DisagreementError(
            f"{what} must agree within {tolerance:g} of their size, got {ours[place]!r} and "
            f"{other[place]!r} at place {place} of {len(ours)}; the two did not compute the same, "
            f"so no ratio is given"
        )
    return max(gaps)


def show(report: Report) -> None:
    """Print medians, and the ratio of times with its spread over the pairs."""
    about = ", ".join(f"{name} {value}" for name, value in report.about.items())
    num_pairs = len(report.comparisons[0].ours_s) if report.comparisons else 0
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("", "ours", "other", "ratio", "spread"):
        table.add_column(column, justify="right" if column else "left", no_wrap=True)
    table.add_column("target")
    for each in report.comparisons:
        ours, other = statistics.median(each.ours_s), statistics.median(each.other_s)
        ratio = statistics.median(each.ratios)
        spread = f"{min(each.ratios):.2f} to {max(each.ratios):.2f}"
        row = [f"{ours:.3f} s", f"{other:.3f} s", f"{ratio:.3f}", spread, each.target]
        table.add_row(each.name, *row)
        if each.amount:
            speeds = [f"{each.amount / ours:,.0f}", f"{each.amount / other:,.0f}"]
            table.add_row(f"  {each.unit} a second", *speeds, "", "", "", style="dim")
    console = Console(width=WIDTH, highlight=False)
    pairs = f"; medians of {num_pairs} pairs" if num_pairs else ""
    console.print(f"{about}{pairs}", markup=False)
    if num_pairs:
        console.print(table)
    for title, (head, *rows) in report.tables.items():
        figures = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for column in head:
            figures.add_column(column, justify="right" if column else "left", no_wrap=True)
        for cells in rows:
            figures.add_row(*cells)
        console.print(figures)
    for note in report.notes:
        console.print(f"- {note}", markup=False)


def write_json(report: Report, path: Path) -> None:
    """Write every single time, so that others can look at it their way."""
    rows = [each.figures() for each in report.comparisons]
    values = dict(report.about) | {"comparisons": rows, "notes": list(report.notes)}
    path.write_text(json.dumps(values | dict(report.more), indent=1), encoding="utf-8")


def draw(report: Report, path: Path) -> None:
    """Draw the ratio of each pair, one row of points a comparison, the median as a stroke."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = list(reversed(report.comparisons))
    figure, axes = plt.subplots(figsize=(8, 1.2 + 0.5 * len(rows)), layout="constrained")
    for height, each in enumerate(rows):
        axes.plot(each.ratios, [height] * len(each.ratios), "o", alpha=0.5)
        axes.plot(statistics.median(each.ratios), height, "k|", markersize=20)
    axes.axvline(1.0, color="grey", linewidth=1)
    axes.set_yticks(range(len(rows)), [each.name for each in rows])
    axes.set_ylim(-0.5, len(rows) - 0.5)
    axes.set_xlabel("time of ours / time of the other; a point is a pair")
    figure.savefig(path, dpi=150)
    plt.close(figure)
