"""Warn of sequences that are longer than the positions that a model was made for.

Nothing fails there: positions beyond mean nothing to the model, and the loss shows it late.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from torchtitan.models.sizes import RopeScaling

logger = logging.getLogger(__name__)


def warn_beyond_rope(scaling: RopeScaling, *, lengths: Mapping[str, int]) -> None:
    """Log a warning if sequences are longer than YaRN's rotation reaches.

    `lengths` has their tokens by key. Llama 3's rotation has no such limit: Llama 3.1 multiplies
    8,192 positions by 8, and is published for 131,072.
    """
    if scaling.type != "yarn":
        return
    reached = int(scaling.factor * scaling.original_max_position)
    for key, seq_len in lengths.items():
        if reached < seq_len:
            logger.warning(
                "The rope scaling reaches %d positions (factor %g x original_max_position %d), "
                "%s is %d; to reach as many raise model.rope_scaling.factor to %g",
                reached,
                scaling.factor,
                scaling.original_max_position,
                key,
                seq_len,
                seq_len / scaling.original_max_position,
            )
