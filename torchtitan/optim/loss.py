"""The loss: the sum of the cross-entropies of valid tokens over the number of valid tokens.

Labels hold `IGNORE_INDEX` where no loss is due; there is no other mask. The sum is taken here, the
division by the valid tokens of the whole global batch is the step loop's, so that the result does
not depend on how the batch is cut into microbatches, accumulation steps or ranks. (A mean taken
per microbatch weighs a token by the emptiness of its batch.)

Shapes: B samples, S tokens, V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats, in float32, of the labels that are valid."""
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(),
        labels_BS.flatten(0, 1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def count_valid(labels_BS: Tensor) -> Tensor:
    """Return the number of labels that are valid, an int64 scalar on their device."""
    return torch.count_nonzero(labels_BS != IGNORE_INDEX)
