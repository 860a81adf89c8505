"""Progress and tables of an evaluation, printed by rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track
from rich.table import Table

T = TypeVar("T")
WIDTH = 160
"""Columns of a table that is not printed to a terminal."""


def is_first_rank() -> bool:
    """Return whether this rank reports."""
    return os.environ.get("RANK", "0") == "0"


def tracked(items: Iterable[T], what: str, *, total: int) -> Iterable[T]:
    """Yield the items, with a progress bar in a terminal."""
    return track(
        items,
        what,
        total=total,
        console=Console(stderr=True),
        transient=True,
        disable=not (sys.stderr.isatty() and is_first_rank()),
    )


def show(report: Mapping[str, Any]) -> None:
    """Print the figures, after the step or folder of the model."""
    sys.stdout.write(f"checkpoint: {report['checkpoint']}\n")  # a long path stays on one line
    console = Console(width=None if sys.stdout.isatty() else WIDTH)
    if report["perplexity"]:
        table = _table("domain", "loss", "perplexity", "bits/byte", "tokens", "documents", "bytes")
        for name, row in report["perplexity"].items():
            counts = (f"{row[key]:,}" for key in ("num_tokens", "num_documents", "num_bytes"))
            figures = (f"{row[key]:.4f}" for key in ("loss", "perplexity", "bits_per_byte"))
            table.add_row(name, *figures, *counts)
        console.print(table)
    if report["tasks"]:
        table = _table("task", "metric", "value", "stderr", "examples", "shots")
        for name, task in report["tasks"].items():
            examples, shots = str(task["num_examples"]), str(task["num_fewshot"])
            for metric, figure in task["figures"].items():
                error = "" if figure["stderr"] is None else f"± {figure['stderr']:.4f}"
                table.add_row(name, metric, f"{figure['value']:.4f}", error, examples, shots)
        console.print(table)


def _table(first: str, *others: str) -> Table:
    table = Table(first)
    for name in others:
        table.add_column(name, justify="right")
    return table
