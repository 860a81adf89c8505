"""What a person at the terminal sees besides the log: a bar with the time left, and a summary.

The bar stays on the last line while log lines scroll above it. That takes one writer: rich, while
it draws, stands in for `sys.stderr`, and the console log handler writes to whatever that is; the
other picked ranks clear the line before they write (see `base/log.py`). Off a terminal there is
no bar at all: a log file full of half-drawn bars helps nobody.
"""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from torchtitan.base.log import is_terminal

logger = logging.getLogger(__name__)


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


@contextmanager
def progress_bar(
    *, done_steps: int, total_steps: int, show: bool, color: bool
) -> Iterator[Callable[[int], None]]:
    """Draw a bar of steps and time left while inside; yield a function to call with each step done.

    `done_steps`: those of earlier starts. Without `show` nothing is drawn.
    """
    if not show:
        yield lambda step: None
        return
    from rich import progress
    from rich.console import Console

    with progress.Progress(
        progress.TextColumn("training"),
        progress.BarColumn(bar_width=None),
        progress.MofNCompleteColumn(),
        progress.TextColumn("elapsed"),
        progress.TimeElapsedColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        console=Console(stderr=True, no_color=not color),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=is_terminal(sys.stdout),  # else what is piped away would turn up here
        expand=True,
    ) as bar:
        task = bar.add_task("training", total=total_steps, completed=done_steps)
        yield lambda step: bar.update(task, completed=step)


def show_summary(summary: Summary, *, terminal: bool, color: bool) -> None:
    """Log the summary once: a table on a terminal, plain aligned lines elsewhere."""
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
    text = _table(entries, color=color) if terminal else _aligned(entries)
    logger.info("training finished\n%s", text)


def _table(entries: Mapping[str, str], *, color: bool) -> str:
    from rich.box import ROUNDED
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=ROUNDED, show_header=False)
    table.add_column(style="bold cyan" if color else "", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in entries.items():
        table.add_row(name, Text(value))  # Text: a path may hold [brackets]
    written = io.StringIO()
    width = Console(stderr=True).width
    Console(file=written, force_terminal=color, no_color=not color, width=width).print(table)
    return written.getvalue().rstrip("\n")


def _aligned(entries: Mapping[str, str]) -> str:
    width = max(map(len, entries))
    return "\n".join(f"  {name:<{width}}  {value}" for name, value in entries.items())


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
