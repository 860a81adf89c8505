"""Console output: one line per logged step, a progress bar and a summary.

On a terminal the bar stays on the last line while log lines scroll above it. This works because
rich replaces `sys.stderr` while it draws and the console log handler always writes to the current
`sys.stderr`. Other shown ranks clear the line before they write (see `base/log.py`). Without a
terminal no bar is drawn, since it would fill a log file with partial lines.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from torchtitan.base.log import Style, is_terminal, paint
from torchtitan.metrics.rows import Row

if TYPE_CHECKING:
    from rich.progress import Progress

logger = logging.getLogger(__name__)
_TRAINING = "training"

# figure of a row -> pattern, color
_COLUMNS: Mapping[str, tuple[str, Style]] = {
    "step": ("step: {:>6d}{}", "red"),
    "loss": ("loss: {:8.5f}", "green"),
    "grad_norm": ("grad_norm: {:8.4f}", "yellow"),
    "lr": ("lr: {:.2e}", "magenta"),
    "tokens_per_second": ("tokens/s: {:,.0f}", "blue"),
    "mfu": ("mfu: {:.2f}%", "cyan"),
    "router/load_max_over_mean": ("expert load: {:.2f}x", "cyan"),
    "memory_peak_gib": ("memory: {:.2f}GiB", "dim"),
    "validation_loss": ("validation loss: {:8.5f}", "green"),
    "validation_perplexity": ("perplexity: {:.5g}", "green"),
}


class ConsoleSink:
    """Log one line per row, to the console of the shown ranks and to each rank's log file."""

    def __init__(self, *, last_step: int, color: bool) -> None:
        self._end, self._color = f"/{last_step}", color

    def write(self, row: Row) -> None:
        """Log the row. Missing figures are left out; a missing loss is a dash and a warning."""
        columns = [
            paint(pattern.format(row[name], self._end), style, color=self._color)
            for name, (pattern, style) in _COLUMNS.items()
            if row.get(name) is not None
        ]
        has_no_loss = "loss" in row and row["loss"] is None
        if has_no_loss:
            columns.insert(1, paint(f"loss: {'-':>8}", "green", color=self._color))
        logger.info("  ".join(columns))
        if has_no_loss:
            text = "Step %d has no loss, because its batch has no labels. Its gradients are zero."
            logger.warning(text, row["step"])

    def close(self) -> None:
        """Do nothing."""


def shows_bar(rank: int, *, console_ranks: frozenset[int]) -> bool:
    """Return whether this rank draws the bar: the first shown rank does, on a terminal."""
    return rank == min(console_ranks) and is_terminal(sys.stderr)


class ProgressBar:
    """Progress bar with the current activity and the time left, drawn while the context is open."""

    def __init__(self, *, done_steps: int, total_steps: int, show: bool, color: bool) -> None:
        self._bar = _build_bar(color=color) if show else None
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
        """Show that `step` is finished."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], completed=step)

    @contextmanager
    def status(self, activity: str) -> Iterator[None]:
        """Show an activity other than training, such as "saving"."""
        self._describe(activity)
        try:
            yield
        finally:
            self._describe(_TRAINING)

    def _describe(self, activity: str) -> None:
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=activity, refresh=True)


def _build_bar(*, color: bool) -> Progress:
    from rich import progress
    from rich.console import Console

    return progress.Progress(
        progress.TextColumn("{task.description:<10}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TextColumn("left"),
        progress.TimeRemainingColumn(),
        # soft_wrap: the terminal wraps long log lines, so that copying one gives a single line
        console=Console(stderr=True, no_color=not color, soft_wrap=True),
        refresh_per_second=2,
        transient=True,
        redirect_stdout=is_terminal(sys.stdout),  # never redirect a pipe to the terminal
    )


def log_summary(entries: Mapping[str, str]) -> None:
    """Log the results of a finished run, one line per entry."""
    width = max(map(len, entries))
    lines = (f"\n  {name:<{width}}  {value}" for name, value in entries.items())
    logger.info("training finished%s", "".join(lines))
