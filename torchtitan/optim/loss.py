"""The loss: the sum of the cross-entropies of valid tokens over the number of valid tokens.

Labels hold `IGNORE_INDEX` where no loss is due; there is no other mask. The sum is taken here, the
division by the valid tokens of the whole global batch is the step loop's, so that the result does
not depend on how the batch is cut into microbatches, accumulation steps or ranks. (A mean taken
per microbatch weighs a token by the emptiness of its batch.)

Under tensor parallelism each rank has the logits of its own part of the vocabulary. A softmax needs
of the others but three numbers a token: the largest logit, the sum of exponentials and the label's
logit. So the parts are never gathered, which would cost V instead.

Shapes: B samples, S tokens, N = B S, C width, V vocabulary or this rank's part of it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

IGNORE_INDEX = -100


def build_loss(group: dist.ProcessGroup | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return what makes the head's input (B, S, C), its weight (V, C) and labels a summed loss.

    `group` are the ranks that each have an equal part of the vocabulary, in their order; None: this
    rank has all of it.
    """

    def loss(x_BSC: Tensor, weight_VC: Tensor, labels_BS: Tensor) -> Tensor:
        logits_BSV = F.linear(x_BSC, weight_VC)
        if group is None:
            return cross_entropy_sum(logits_BSV, labels_BS)
        return split_cross_entropy_sum(logits_BSV, labels_BS, group=group)

    return loss


def cross_entropy_sum(logits_BSV: Tensor, labels_BS: Tensor) -> Tensor:
    """Return the summed cross-entropy in nats, in float32, of the labels that are valid."""
    return F.cross_entropy(
        logits_BSV.flatten(0, 1).float(),
        labels_BS.flatten(0, 1),
        ignore_index=IGNORE_INDEX,
        reduction="sum",
    )


def split_cross_entropy_sum(
    logits_BSV: Tensor, labels_BS: Tensor, *, group: dist.ProcessGroup
) -> Tensor:
    """Return the same from this rank's part of the vocabulary; all ranks of `group` have the sum.

    The gradient of the logits is that of this rank's part. A label outside the vocabulary makes the
    loss NaN.
    """
    loss_N = _SplitCrossEntropy.apply(logits_BSV.flatten(0, 1), labels_BS.flatten(0, 1), group)
    return loss_N.sum()


class _SplitCrossEntropy(torch.autograd.Function):
    """Each token's loss by itself, so that a caller may also come with some of the tokens.

    Of the forward pass only the logits, in their own type, and a few numbers a token are kept.
    """

    @staticmethod
    def forward(ctx: Any, given_NV: Tensor, labels_N: Tensor, group: dist.ProcessGroup) -> Tensor:
        part = given_NV.shape[1]
        logits_NV = given_NV.float()
        largest_N = logits_NV.amax(1)
        dist.all_reduce(largest_N, dist.ReduceOp.MAX, group=group)
        place_N = labels_N - dist.get_rank(group) * part
        is_here_N = (place_N >= 0) & (place_N < part)
        column_N1 = place_N.where(is_here_N, 0)[:, None]
        # all relative to the largest: added back, it would round small differences away
        logits_NV = logits_NV - largest_N[:, None]
        at_label_N = logits_NV.gather(1, column_N1).squeeze(1).where(is_here_N, 0.0)
        sums_2N = torch.stack((logits_NV.exp_().sum(1), at_label_N))
        dist.all_reduce(sums_2N, group=group)
        log_sum_N, at_label_N = sums_2N[0].log(), sums_2N[1]
        is_due_N = labels_N != IGNORE_INDEX
        is_known_N = (labels_N >= 0) & (labels_N < part * dist.get_world_size(group))
        ctx.save_for_backward(given_NV, largest_N, log_sum_N, column_N1, is_here_N, is_due_N)
        return (log_sum_N - at_label_N).where(is_known_N, torch.nan).where(is_due_N, 0.0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        given_NV, largest_N, log_sum_N, column_N1, is_here_N, is_due_N = ctx.saved_tensors
        [grad_N] = grads
        # softmax less one at the label
        grad_NV = (given_NV.float() - largest_N[:, None]).sub_(log_sum_N[:, None]).exp_()
        at_label_N1 = grad_NV.gather(1, column_N1)
        grad_NV.scatter_(1, column_N1, at_label_N1 - is_here_N[:, None].float())
        grad_NV.mul_((grad_N * is_due_N)[:, None])
        return grad_NV.to(given_NV.dtype), None, None


def count_valid(labels_BS: Tensor) -> Tensor:
    """Return the number of labels that are valid, an int64 scalar on their device."""
    return torch.count_nonzero(labels_BS != IGNORE_INDEX)
