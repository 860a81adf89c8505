"""Custom code around the loop: a callback, a metrics sink, a loss and a learning rate decay.

    python -m torchtitan.train \
        --training.callbacks '{path = "examples.own_hooks:StopEarly", patience = 2}' \
        --metrics.sinks examples.own_hooks:CsvSink --training.loss examples.own_hooks:smoothed \
        --lr_scheduler.decay_type examples.own_hooks:quadratic --validation.enable \
        --validation.holdout_fraction 0.05 --training.steps 20
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch.nn.functional as F
from torch import Tensor


class StopEarly:
    """A callback: any of on_start, on_step, on_validation, on_checkpoint and on_end.

    Args:
        patience: Validations without a new lowest loss before the run is stopped.
    """

    def __init__(self, patience: int = 3) -> None:
        self.patience, self.lowest, self.num_worse = patience, float("inf"), 0

    def on_validation(self, step: int, row: Mapping[str, Any]) -> dict[str, float]:
        """Count validations since the lowest loss, and return a figure to add to the row."""
        self.num_worse = 0 if row["validation_loss"] < self.lowest else self.num_worse + 1
        self.lowest = min(self.lowest, row["validation_loss"])
        return {"lowest_validation_loss": self.lowest}

    def on_step(self, step: int, row: Mapping[str, Any] | None) -> str | None:
        """Return a reason to stop all ranks after saving a checkpoint, or None."""
        is_over = self.num_worse >= self.patience
        return f"no lower validation loss than {self.lowest:.4f}" if is_over else None


class CsvSink:
    """A sink: receives the figures of each logged step."""

    def __init__(self, *, folder: Path, rank: int, resume_step: int, name: str = "losses") -> None:
        self._file = (folder / f"{name}.csv").open("a", newline="")
        self._writer = csv.writer(self._file)

    def write(self, row: Mapping[str, Any]) -> None:
        """Write a line."""
        self._writer.writerow([row["step"], row["loss"], row["grad_norm"]])

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def smoothed(logits: Tensor, labels: Tensor, *, share: float = 0.1) -> Tensor:
    """Return cross-entropy with this share of the label's weight spread over the vocabulary."""
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=share)


def quadratic(progress: float) -> float:
    """Return the fraction of the peak rate: the decay is fast first and slow at the end."""
    return (1 - progress) ** 2
