"""Which checkpoints to keep: the newest, and those with the lowest validation loss.

The validation loss of a checkpoint is in its manifest, with the fingerprint of the validation data:
the best checkpoints are known after any restart, and losses on other data are not compared.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torchtitan.base.errors import CheckpointError

logger = logging.getLogger(__name__)
SCORE = "validation"


def describe_score(loss: float, *, data: str) -> dict[str, Any]:
    """Return the manifest's entry for a validation loss on `data`, a fingerprint."""
    return {SCORE: {"loss": loss, "data": data}}


@dataclass(frozen=True, kw_only=True)
class Retention:
    """Which checkpoints to keep."""

    keep_latest: int
    """Number of newest checkpoints to keep; 0: all."""
    keep_best: int = 0
    """Number of checkpoints with the lowest validation loss to keep."""
    data: str | None = None
    """Fingerprint of the data on which losses are compared."""

    def steps_to_delete(
        self, steps: Sequence[int], *, manifest_of: Callable[[int], Mapping[str, Any]]
    ) -> list[int]:
        """Return which of `steps`, ascending, to delete, and log the best one.

        `manifest_of` reads the manifest of a step; a CheckpointError is logged.
        """
        best: list[int] = []
        if self.keep_best and self.data is not None:
            ranked = rank_steps(steps, data=self.data, manifest_of=manifest_of)
            best = [step for step, _ in ranked[: self.keep_best]]
            if ranked:
                logger.info("The best checkpoint is step-%d, validation loss %.5f", *ranked[0])
        if not self.keep_latest:
            return []
        return [step for step in steps[: -self.keep_latest] if step not in best]


def rank_steps(
    steps: Sequence[int], *, data: str, manifest_of: Callable[[int], Mapping[str, Any]]
) -> list[tuple[int, float]]:
    """Return (step, loss) of the steps validated on `data`, lowest loss first, then newest."""
    found = []
    for step in steps:
        try:
            score = manifest_of(step).get(SCORE)
        except CheckpointError as error:
            logger.warning("The validation loss of step-%d cannot be read: %s", step, error)
            continue
        if isinstance(score, dict) and score.get("data") == data:
            loss = score.get("loss")
            if isinstance(loss, float) and isfinite(loss):
                found.append((step, loss))
    return sorted(found, key=lambda scored: (scored[1], -scored[0]))
