"""Progress and tables of an evaluation, printed by rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import track

from torchtitan.tools.verbs import format_table

T = TypeVar("T")


def is_first_rank() -> bool:
    """Return whether this rank reports."""
    return os.environ.get("RANK", "0") == "0"


def tracked(items: Iterable[T], noun: str, *, total: int) -> Iterable[T]:
    """Yield the items, with a progress bar in a terminal."""
    return track(
        items,
        noun,
        total=total,
        console=Console(stderr=True),
        transient=True,
        disable=not (sys.stderr.isatty() and is_first_rank()),
    )


def show(report: Mapping[str, Any]) -> None:
    """Print the figures, after the step or folder of the model."""
    lines = [f"checkpoint: {report['checkpoint']}"]
    if report["perplexity"]:
        rows = [["domain", "loss", "perplexity", "bits/byte", "tokens", "documents", "bytes"]]
        for name, row in report["perplexity"].items():
            figures = (f"{row[key]:.4f}" for key in ("loss", "perplexity", "bits_per_byte"))
            counts = (f"{row[key]:,}" for key in ("num_tokens", "num_documents", "num_bytes"))
            rows.append([name, *figures, *counts])
        lines += format_table(rows)
    if report["tasks"]:
        rows = [["task", "metric", "value", "stderr", "examples", "shots"]]
        for name, task in report["tasks"].items():
            examples, shots = str(task["num_examples"]), str(task["num_fewshot"])
            for metric, figure in task["figures"].items():
                error = "" if figure["stderr"] is None else f"± {figure['stderr']:.4f}"
                rows.append([name, metric, f"{figure['value']:.4f}", error, examples, shots])
        lines += format_table(rows)
    sys.stdout.write("\n".join([*lines, ""]))
