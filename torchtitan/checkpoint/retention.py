"""Which checkpoints stay: the newest, and those of lowest validation loss.

What a checkpoint scored stands in its own manifest, beside the fingerprint of the data that it was
measured on, so that which one is best needs no other file and is known after any restart. Losses on
other data say nothing about each other, and are not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path
from typing import Any

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.storage import read_manifest

logger = logging.getLogger(__name__)
SCORE = "validation"
ReadManifest = Callable[[int], Mapping[str, Any]]


@dataclass(frozen=True)
class Scored:
    """A checkpoint and its validation loss."""

    step: int
    loss: float


def describe_score(loss: float, *, data: str) -> dict[str, Any]:
    """Return what a manifest says of a validation."""
    return {SCORE: {"loss": loss, "data": data}}


@dataclass(frozen=True, kw_only=True)
class Retention:
    """How many of the latest steps stay (0: all of them), and of those of lowest loss on `data`."""

    keep_latest: int
    keep_best: int = 0
    data: str | None = None

    def to_delete(
        self, steps: Sequence[int], *, place: Path | str, read: ReadManifest | None = None
    ) -> list[int]:
        """Return which of the `steps` in `place`, ascending, may go, and log which is best."""
        best: list[int] = []
        if self.keep_best and self.data is not None:
            ranked = rank_steps(place, steps, data=self.data, read=read)
            best = [scored.step for scored in ranked[: self.keep_best]]
            if ranked:
                logger.info(
                    "The best checkpoint is step-%d, validation loss %.5f",
                    ranked[0].step,
                    ranked[0].loss,
                )
        return steps_to_delete(steps, keep_latest=self.keep_latest, best=best)


def rank_steps(
    place: Path | str, steps: Sequence[int], *, data: str, read: ReadManifest | None = None
) -> list[Scored]:
    """Return the steps that were validated on `data`, the lowest loss first, of equal ones the
    later step. `read` returns a step's manifest; None: `place` is a folder."""
    found = []
    for step in steps:
        try:
            about = read_manifest(Path(place, f"step-{step}")) if read is None else read(step)
            score = about.get(SCORE)
        except CheckpointError as error:
            logger.warning("step %d in %s has no validation loss: %s", step, place, error)
            continue
        if isinstance(score, dict) and score.get("data") == data:
            loss = score.get("loss")
            if isinstance(loss, float) and isfinite(loss):
                found.append(Scored(step, loss))
    return sorted(found, key=lambda scored: (scored.loss, -scored.step))


def steps_to_delete(steps: Sequence[int], *, keep_latest: int, best: Sequence[int]) -> list[int]:
    """Return the `steps`, ascending, that are neither among the latest nor the best; 0 keeps all
    of them."""
    return [step for step in steps[:-keep_latest] if step not in best] if keep_latest else []
