"""What a person at the terminal sees besides the log: a bar with the time left, and a summary.

The bar stays on the last line while log lines scroll above it. That takes one writer: rich, while
it draws, stands in for `sys.stderr`, and the console log handler writes to whatever that is; the
other picked ranks clear the line before they write (see `base/log.py`). Off a terminal there is
no bar at all: a log file full of half-drawn bars helps nobody.
"""

from __future__ import annotations

import io
import logging
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torchtitan.base.log import is_terminal

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)
_TRAINING = "training"


@dataclass(frozen=True, kw_only=True)
class Summary:
    """A finished run: totals of the whole training, speed of this start.

    `places` tell where its output lies: "metrics" -> "outputs/metrics.jsonl".
    """

    num_steps: int
    num_tokens: int
    final_loss: float | None
    validation_loss: float | None = None
    tokens_per_second: float
    seconds: float
    places: Mapping[str, str] = field(default_factory=dict)


def shows_bar(rank: int, *, shown: frozenset[int]) -> bool:
    """Tell whether this rank draws the bar: the first of the picked ranks, on a terminal."""
    return rank == min(shown) and is_terminal(sys.stderr)


class ProgressBar:
    """Steps done, what is going on, and the time left: drawn while inside `with`.

    `done_steps`: those of earlier starts. Without `show` nothing is drawn.
    """

    def __init__(self, *, done_steps: int, total_steps: int, show: bool, color: bool) -> None:
        self._bar = _bar(color=color) if show else None
        if self._bar is not None:
            self._bar.add_task(_TRAINING, total=total_steps, completed=done_steps)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int) -> None:
        """Show that training step number `step` is done."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    @contextmanager
    def doing(self, activity: str) -> Iterator[None]:
        """Show inside what is done instead of training: "saving", "validating"."""
        self._name(activity)
        try:
            yield
        finally:
            self._name(_TRAINING)

    def _name(self, activity: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=activity, refresh=True)


def _bar(*, color: bool) -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description:<10}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        # soft: the terminal wraps long lines itself, and gives them back whole when they are copied
        console=Console(stderr=True, no_color=not color, soft_wrap=True),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=is_terminal(sys.stdout),  # else what is piped away would turn up here
    )


def show_summary(summary: Summary, *, terminal: bool, color: bool) -> None:
    """Log the summary once: a table on a terminal that can show it, else plain aligned lines."""
    figures = {
        "steps": f"{summary.num_steps:,}",
        "tokens": f"{summary.num_tokens:,}",
        "final loss": "none" if summary.final_loss is None else f"{summary.final_loss:.5f}",
        "validation loss": ""
        if summary.validation_loss is None
        else f"{summary.validation_loss:.5f}",
        "tokens/s": f"{summary.tokens_per_second:,.0f}",
        "time": _duration(summary.seconds),
    }
    entries = {name: text for name, text in {**figures, **summary.places}.items() if text}
    text = _table(entries, color=color) if terminal and _fits(entries) else _aligned(entries)
    logger.info("training finished\n%s", text)


def _fits(entries: Mapping[str, str]) -> bool:
    """Tell whether the terminal is wide enough for the table, and has letters for its lines."""
    widths = [max(map(len, column)) for column in (entries.keys(), entries.values())]
    room = shutil.get_terminal_size().columns
    return sum(widths) + len("│  │  │") <= room and "utf" in (sys.stderr.encoding or "").lower()


def _table(entries: Mapping[str, str], *, color: bool) -> str:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=ROUNDED, show_header=False)
    table.add_column(style="bold cyan" if color else "", no_wrap=True)
    table.add_column(no_wrap=True)
    for name, value in entries.items():
        table.add_row(name, Text(value))  # Text: a path may hold [brackets]
    written = io.StringIO()
    # wide enough for any: it was measured before
    Console(file=written, force_terminal=color, no_color=not color, width=10_000).print(table)
    return written.getvalue().rstrip("\n")


def _aligned(entries: Mapping[str, str]) -> str:
    width = max(map(len, entries))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in entries.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
