"""The loss: the sum of the cross-entropies of valid tokens over the number of valid tokens.

Labels hold `IGNORE_INDEX` where no loss is due, without any other mask. The sum is computed
here. The step loop divides it by the valid tokens of the global batch, so that the result does not
depend on the split of the batch into microbatches, accumulation steps or ranks. (A mean per
microbatch would give more weight to the tokens of a microbatch with few valid ones.)

The logits are the largest tensor of all, V numbers per token where the stream has C, but only the
loss and its gradients are needed, which are sums over tokens. So the head's product, the softmax
and both gradients are computed for some tokens at a time, in one buffer, and the N x V logits never
exist. The gradients are computed in the forward pass, while the logits exist: three products, as
with plain autograd, and backward only multiplies by the incoming gradient. (Recomputing the logits
in backward would be a fourth product, and a fifth where a pipeline computes gradients of inputs and
weights separately. It pays where many microbatches wait for their backward, since each would hold a
gradient as large as the weight.)

Between the products a chunk's logits are read and written by a few passes. Two of them can be
compiled, from logits to sums of exponentials and from logits to gradients. Then nothing in float32
is written.

With tensor parallelism each rank has the logits of its own part of the vocabulary. A softmax needs
only three numbers per token from the other ranks: the largest logit, the sum of exponentials and
the label's logit. So the logits are never gathered, which would cost V numbers instead.

Shapes: B samples, S tokens, N = B S, M tokens of a chunk, C width, V vocabulary of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import ceil
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.custom import convert_errors, is_import_path, load_object
from torchtitan.base.errors import ConfigError
from torchtitan.models.interface import HeadLoss

LOSS = "training.loss"
IGNORE_INDEX = -100

FEW_LOGITS = 2**24
"""Up to this number of logits, 64 MiB, are computed at once."""
FEWEST_TOKENS = {"cpu": 512, "cuda": 2048}
"""Least number of tokens per chunk. With fewer, products are bound by the weight's memory."""
PRODUCT = 2**22
"""Elements of a gradient that are added at a time, if the addition is not part of the product."""


class HasFigures(Protocol):
    """A loss with figures beside its sum."""

    def begin(self) -> None:
        """Forget them."""
        ...

    def figures(self) -> dict[str, Tensor]:
        """Return those of what was computed since, equal on all ranks. Collective."""
        ...


TokenLosses = Callable[[Tensor, Tensor], Tensor]
"""From logits (M, V) in float32 and labels (M) to the loss of each token (M)."""


def build_loss(
    group: dist.ProcessGroup | None,
    *,
    num_chunks: int = 0,
    recompute: bool = False,
    backend: str | None = None,
    token_losses: TokenLosses | None = None,
    per_token: bool = False,
) -> HeadLoss:
    """Return a function from the head's input (B, S, C), its weight (V, C) and labels to the loss.

    The loss is a sum, or with `per_token` that of each token (B, S), 0 where none is due. It is NaN
    if a label is outside the vocabulary.

    `group` has the ranks with equal parts of the vocabulary, in their order; None: this rank has it
    all. `num_chunks` 0: see `chunk_size`. With `recompute`, and for `per_token`, gradients are
    computed in backward from input and weight, not in forward; with `recompute` each by itself. The
    compiler `backend` fuses the passes over logits. `token_losses` replaces the cross-entropy,
    without a `group` or a compiler.
    """
    assert group is None or token_losses is None
    fused = None if backend is None else _FusedPasses(backend)

    def loss(x_BSC: Tensor, weight_VC: Tensor, labels_BS: Tensor) -> Tensor:
        x_NC, labels_N = x_BSC.flatten(0, 1), labels_BS.flatten()
        device_type, width = x_NC.device.type, x_NC.shape[1]
        size = chunk_size(
            len(x_NC), len(weight_VC), device_type, width=width, num_chunks=num_chunks
        )
        head = _Head(group, size, fused)
        if token_losses is not None:
            head = _OwnHead(None, size, None, token_losses)
        if recompute or per_token:
            loss_N, *_ = head(x_NC, weight_VC, labels_N)
            ends = [(x_NC, weight_VC)]
            if recompute:  # two nodes: a pipeline may ask for one gradient now and the other later
                ends = [(x_NC, weight_VC.detach()), (x_NC.detach(), weight_VC)]
            for end in ends:
                loss_N = loss_N + _Recomputed.apply(*end, labels_N, head)
            return loss_N.view_as(labels_BS) if per_token else loss_N.sum()
        both = (x_NC, weight_VC)
        is_wanted = [torch.is_grad_enabled() and end.requires_grad for end in both]
        loss_N, *gradients = head(x_NC, weight_VC, labels_N, is_wanted)
        summed = loss_N.sum()
        for end, gradient in zip(both, gradients, strict=True):
            if gradient is not None:
                summed = summed + _Held.apply(end, gradient)
        return summed

    return loss


def chunk_size(
    num_tokens: int, vocab_size: int, device_type: str = "cpu", *, width: int, num_chunks: int = 0
) -> int:
    """Return the number of tokens per chunk, of this rank's part of the vocabulary.

    By default it is a 16th of the tokens, but at most `width`, so that the logits of a chunk are no
    larger than the weight, and at least `FEWEST_TOKENS`. Few logits are one chunk.
    """
    if num_chunks:
        return ceil(num_tokens / num_chunks)
    if num_tokens * vocab_size <= FEW_LOGITS:
        return num_tokens
    return min(num_tokens, max(FEWEST_TOKENS[device_type], min(ceil(num_tokens / 16), width)))


class _Passes:
    """The sums and the gradients that are computed from all logits of a chunk."""

    def __init__(self, logits_MV: Tensor) -> None:
        self.exact_MV = logits_MV
        if logits_MV.dtype != torch.float32:
            self.exact_MV = torch.empty_like(logits_MV, dtype=torch.float32)

    def sum(self, logits_MV: Tensor, largest_M: Tensor) -> Tensor:
        """Return the sums of the exponentials of the logits, relative to the largest."""
        exact_MV, largest_M1 = self.exact_MV[: len(logits_MV)], largest_M[:, None]
        if logits_MV.is_cuda:  # one kernel there, but slow on CPUs
            torch.sub(logits_MV, largest_M1, out=exact_MV)
        else:
            exact_MV.copy_(logits_MV).sub_(largest_M1)
        return exact_MV.exp_().sum(1)

    def weigh(self, logits_MV: Tensor, largest_M: Tensor, factor_M: Tensor) -> None:
        """After `sum`, overwrite the logits by their exponentials times the factors."""
        exact_MV, factor_M1 = self.exact_MV[: len(logits_MV)], factor_M[:, None]
        if logits_MV.is_cuda:
            torch.mul(exact_MV, factor_M1, out=logits_MV)
        else:
            logits_MV.copy_(exact_MV.mul_(factor_M1))


class _FusedPasses(_Passes):
    """The same, each in one compiled kernel that reads the logits and keeps nothing else."""

    def __init__(self, backend: str) -> None:
        fuse = partial(torch.compile, backend=backend, fullgraph=True)
        self._sum, self._weigh = fuse(_sum_exponentials), fuse(_weigh_exponentials)

    def sum(self, logits_MV: Tensor, largest_M: Tensor) -> Tensor:
        return self._sum(logits_MV, largest_M)

    def weigh(self, logits_MV: Tensor, largest_M: Tensor, factor_M: Tensor) -> None:
        self._weigh(logits_MV, largest_M, factor_M)


def _sum_exponentials(logits_MV: Tensor, largest_M: Tensor) -> Tensor:
    return (logits_MV.float() - largest_M[:, None]).exp().sum(1)


def _weigh_exponentials(logits_MV: Tensor, largest_M: Tensor, factor_M: Tensor) -> None:
    logits_MV.copy_((logits_MV.float() - largest_M[:, None]).exp() * factor_M[:, None])


@dataclass(frozen=True)
class _Head:
    """Computes the loss and its gradients, `size` tokens at a time."""

    group: dist.ProcessGroup | None
    size: int
    fused: _FusedPasses | None

    @torch.no_grad()
    def __call__(
        self,
        x_NC: Tensor,
        weight_VC: Tensor,
        labels_N: Tensor,
        is_wanted: Sequence[bool] = (False, False),
        grad_N: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return each token's loss and the wanted gradients of input and weight.

        `grad_N` are the gradients of the token losses. Default: 1, as of their sum. The gradient of
        the weight is float32.
        """
        if grad_N is None and any(is_wanted):
            grad_N = torch.ones_like(labels_N, dtype=torch.float32)
        weight_VC = weight_VC.to(x_NC.dtype)  # on one rank it has its stored dtype
        dx_NC = torch.empty_like(x_NC) if is_wanted[0] else None
        dweight_VC = torch.zeros_like(weight_VC, dtype=torch.float32) if is_wanted[1] else None
        loss_N = torch.empty_like(labels_N, dtype=torch.float32)
        # one buffer for all chunks: allocating each would cost more than its computation
        logits_MV = x_NC.new_empty(self.size, len(weight_VC))
        passes = self.fused or _Passes(logits_MV)
        for start in range(0, len(x_NC), self.size):
            chunk = slice(start, start + self.size)
            x_MC = x_NC[chunk]
            logits_MV = logits_MV[: len(x_MC)]
            torch.mm(x_MC, weight_VC.mT, out=logits_MV)
            grad_M = None if grad_N is None else grad_N[chunk]
            loss_N[chunk] = self._loss(logits_MV, labels_N[chunk], passes, grad_M)
            if dx_NC is not None:
                torch.mm(logits_MV, weight_VC, out=dx_NC[chunk])
            if dweight_VC is not None:
                _add_product(dweight_VC, logits_MV.mT, x_MC)
        return loss_N, dx_NC, dweight_VC

    def _loss(
        self, logits_MV: Tensor, labels_M: Tensor, passes: _Passes, grad_M: Tensor | None
    ) -> Tensor:
        """Return each token's loss. With `grad_M`, the gradients of these losses, overwrite the
        logits by their gradient."""
        part = whole = logits_MV.shape[1]
        place_M = labels_M
        if self.group is not None:
            place_M = labels_M - dist.get_rank(self.group) * part
            whole = part * dist.get_world_size(self.group)
        column_M1 = place_M.clamp(0, part - 1)[:, None]
        is_here_M = place_M == column_M1.squeeze(1)  # then it is due
        largest_M = logits_MV.amax(1).float()
        if self.group is not None:
            dist.all_reduce(largest_M, dist.ReduceOp.MAX, group=self.group)
        # all relative to the largest: added back, it would round small differences away
        here_M = at_label_M = logits_MV.gather(1, column_M1).squeeze(1) - largest_M
        sum_M = passes.sum(logits_MV, largest_M)
        if self.group is not None:
            sums_2M = torch.stack((sum_M, at_label_M.where(is_here_M, 0.0)))
            dist.all_reduce(sums_2M, group=self.group)
            sum_M, at_label_M = sums_2M
        is_due_M = labels_M != IGNORE_INDEX
        if grad_M is not None:  # softmax less one at the label
            share_M = is_due_M * grad_M / sum_M
            passes.weigh(logits_MV, largest_M, share_M)
            slope_M = here_M.exp() * share_M - is_here_M * grad_M
            logits_MV.scatter_(1, column_M1, slope_M.to(logits_MV.dtype)[:, None])
        is_known_M = is_here_M if whole == part else (labels_M >= 0) & (labels_M < whole)
        loss_M = sum_M.log() - at_label_M
        return loss_M.where(is_known_M, torch.nan).where(is_due_M, 0.0)


@dataclass(frozen=True)
class _OwnHead(_Head):
    """Computes the same with a custom loss of each token."""

    token_losses: TokenLosses

    def _loss(
        self, logits_MV: Tensor, labels_M: Tensor, passes: _Passes, grad_M: Tensor | None
    ) -> Tensor:
        is_due_M = labels_M != IGNORE_INDEX
        with torch.set_grad_enabled(grad_M is not None):
            # tokens without a loss get equal logits, so that their unused loss is finite
            leaf_MV = logits_MV.float().where(is_due_M[:, None], 0.0).detach()
            leaf_MV.requires_grad_(grad_M is not None)
            loss_M = self.token_losses(leaf_MV, labels_M.where(is_due_M, 0))
            if loss_M.shape != labels_M.shape:  # a sum would be taken for each token's
                rule = f"must return the loss of each of {len(labels_M)} tokens by itself"
                raise ConfigError.at(LOSS, f"{rule}, got a shape of {tuple(loss_M.shape)}")
            due_M = loss_M.where(is_due_M, 0.0)
        if grad_M is not None:
            logits_MV.copy_(torch.autograd.grad(due_M, leaf_MV, grad_M)[0])
        return due_M.detach()


def find_loss(name: str, options: Mapping[str, Any]) -> TokenLosses | None:
    """Return the custom loss of each token, called with `options`; None for cross-entropy; raise
    ConfigError if it cannot be imported, or is not a function."""
    if not is_import_path(name):
        return None
    losses: Callable[..., Tensor] = load_object(name, key=LOSS)
    if not callable(losses) or isinstance(losses, type):
        rule = f"'{name}' must be a function of logits (tokens, vocabulary) and labels (tokens)"
        raise ConfigError.at(LOSS, f"{rule}, got {losses!r:.80}")

    def checked(logits_MV: Tensor, labels_M: Tensor) -> Tensor:
        with convert_errors(name, key=LOSS):
            return losses(logits_MV, labels_M, **options)

    return checked


def _add_product(total_VC: Tensor, left_VM: Tensor, right_MC: Tensor) -> None:
    """Add a product to float32 sums: one of 16 bits by one kernel of NVIDIA's GPUs, or in parts."""
    if right_MC.dtype == total_VC.dtype:
        total_VC.addmm_(left_VM, right_MC)
        return
    if total_VC.is_cuda and torch.version.hip is None:
        torch.addmm(total_VC, left_VM, right_MC, out_dtype=torch.float32, out=total_VC)
        return
    rows = max(1, PRODUCT // total_VC.shape[1])
    product_RC = right_MC.new_empty(min(rows, len(total_VC)), total_VC.shape[1])
    for total_RC, left_RM in zip(total_VC.split(rows), left_VM.split(rows), strict=True):
        total_RC.add_(torch.mm(left_RM, right_MC, out=product_RC[: len(total_RC)]))


class _Held(torch.autograd.Function):
    """A zero whose backward returns a precomputed gradient.

    Each gradient has a node of its own, which runs once also where a pipeline computes the
    gradients of inputs and weights separately. So it may scale in place, where a copy would be as
    large as the weight. If it ran again, autograd would raise, because the tensor was changed.
    """

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, gradient: Tensor) -> Tensor:
        ctx.dtype = tensor.dtype
        ctx.save_for_backward(gradient)
        return torch.zeros((), device=tensor.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        [gradient], [grad] = ctx.saved_tensors, grads
        return gradient.mul_(grad).to(ctx.dtype), None


class _Recomputed(torch.autograd.Function):
    """Zeros, one per token, whose backward computes the gradients of their losses."""

    @staticmethod
    def forward(ctx: Any, x_NC: Tensor, weight_VC: Tensor, labels_N: Tensor, head: _Head) -> Tensor:
        ctx.head = head
        ctx.save_for_backward(x_NC, weight_VC, labels_N)
        return torch.zeros(len(x_NC), device=x_NC.device)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x_NC, weight_VC, labels_N = ctx.saved_tensors
        _, dx_NC, dweight_VC = ctx.head(x_NC, weight_VC, labels_N, ctx.needs_input_grad[:2], *grads)
        return dx_NC, None if dweight_VC is None else dweight_VC.to(weight_VC.dtype), None, None


def count_valid(labels_BS: Tensor) -> Tensor:
    """Return what a loss is divided by: the number of valid labels, int64 on their device.

    Of preferences (B, S, 4) it is the number of pairs, which the last column counts.
    """
    counted = labels_BS if labels_BS.ndim == 2 else labels_BS[..., -1]
    return torch.count_nonzero(counted != IGNORE_INDEX)
