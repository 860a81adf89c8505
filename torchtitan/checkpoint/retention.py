"""Which checkpoints stay: the newest, and those of lowest validation loss.

What a checkpoint scored stands in its own manifest, beside the fingerprint of the data that it was
measured on, so that which one is best needs no other file and is known after any restart. Losses on
other data say nothing about each other, and are not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.storage import read_manifest

logger = logging.getLogger(__name__)
SCORE = "validation"


@dataclass(frozen=True)
class Scored:
    """A checkpoint and its validation loss."""

    step: int
    loss: float


def describe_score(loss: float, *, data: str) -> dict[str, Any]:
    """Return what a manifest says of a validation."""
    return {SCORE: {"loss": loss, "data": data}}


def rank_steps(folder: Path, steps: Sequence[int], *, data: str) -> list[Scored]:
    """Return the steps that were validated on `data`, the lowest loss first, of equal ones the
    later step."""
    found = []
    for step in steps:
        try:
            score = read_manifest(folder / f"step-{step}").get(SCORE)
        except CheckpointError as error:
            logger.warning("step %d in %s has no validation loss: %s", step, folder, error)
            continue
        if isinstance(score, dict) and score.get("data") == data:
            loss = score.get("loss")
            if isinstance(loss, float):
                found.append(Scored(step, loss))
    return sorted(found, key=lambda scored: (scored.loss, -scored.step))


def steps_to_delete(steps: Sequence[int], *, keep_latest: int, best: Sequence[int]) -> list[int]:
    """Return the `steps`, ascending, that are neither among the latest nor the best; 0 keeps all
    of them."""
    return [step for step in steps[:-keep_latest] if step not in best] if keep_latest else []
