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
        ranking: list[tuple[float, int]] = []
        for step in steps if self.keep_best and self.data is not None else ():
            try:
                score = manifest_of(step).get(SCORE)
            except CheckpointError as error:
                logger.warning("The validation loss of step-%d cannot be read: %s", step, error)
                continue
            if isinstance(score, dict) and score.get("data") == self.data:
                loss = score.get("loss")
                if isinstance(loss, float) and isfinite(loss):
                    ranking.append((loss, -step))  # of equal losses the newest
        best = [-step for _, step in sorted(ranking)[: self.keep_best]]
        if best:
            logger.info(
                "The best checkpoint is step-%d, validation loss %.5f", best[0], min(ranking)[0]
            )
        if not self.keep_latest:
            return []
        return [step for step in steps[: -self.keep_latest] if step not in best]
