"""Attention of a block of queries to a block of keys, and how two such results become one.

Softmax over keys that come in pieces needs, beside each piece's output, the logarithm of its sum of
exponentials: then pieces are merged exactly, in any order (arXiv:2205.14135). PyTorch's public
attention keeps that number to itself, the operators below it return it: one for each kind of device
and dtype. Backward takes the *merged* output and log-sum-exp, so that a piece's gradients are right
without the other pieces. No kernel holds a matrix of scores, nor takes a mask.

Measured on CPU alone. The two CUDA kernels follow PyTorch's declarations and have not been run; the
one for 16 bits needs a head width that is a multiple of 8.

Shapes: B batch, H query heads, K key/value heads, S queries, T keys, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

aten = torch.ops.aten
LSE_ALIGNMENT = 32
"""Rows to a multiple of which the CUDA kernel for float32 pads its log-sum-exp."""


def attend(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """Return the output, as q, and the log-sum-exp of the scores, float32 of shape (B, H, S)."""
    if q_BHSD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q_BHSD, k_BKTD, v_BKTD, 0.0, causal)
    k_BHTD, v_BHTD = _spread(k_BKTD, like=q_BHSD), _spread(v_BKTD, like=q_BHSD)
    if q_BHSD.dtype == torch.float32:
        out_BHSD, lse, *_ = aten._scaled_dot_product_efficient_attention(
            q_BHSD, k_BHTD, v_BHTD, None, True, 0.0, causal
        )
        return out_BHSD, lse[..., : q_BHSD.shape[2]]
    out_BHSD, lse_BHS, *_ = aten._scaled_dot_product_flash_attention(
        q_BHSD, k_BHTD, v_BHTD, 0.0, causal
    )
    return out_BHSD, lse_BHS


def attend_backward(
    grad_BHSD: Tensor,
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    out_BHSD: Tensor,
    lse_BHS: Tensor,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v by this block, given output and log-sum-exp over all."""
    grad, out, lse = grad_BHSD.contiguous(), out_BHSD.contiguous(), lse_BHS.contiguous()
    if q_BHSD.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad, q_BHSD, k_BKTD, v_BKTD, out, lse, 0.0, causal
        )
    k, v = _spread(k_BKTD, like=q_BHSD), _spread(v_BKTD, like=q_BHSD)
    unused = torch.zeros((), dtype=torch.int64, device=q_BHSD.device)  # state of a dropout of 0
    if q_BHSD.dtype == torch.float32:
        # rows of the padding have an infinite sum, so that their probabilities are 0
        lse = F.pad(lse, (0, -lse.shape[2] % LSE_ALIGNMENT), value=torch.inf)
        dq, dk, dv, _ = aten._scaled_dot_product_efficient_attention_backward(
            grad, q_BHSD, k, v, None, out, lse, unused, unused, 0.0, [True, True, True, False],
            causal,
        )  # fmt: skip
    else:
        lengths = q_BHSD.shape[2], k.shape[2]
        dq, dk, dv = aten._scaled_dot_product_flash_attention_backward(
            grad, q_BHSD, k, v, out, lse, None, None, *lengths, 0.0, causal, unused, unused
        )
    return dq, _collect(dk, like=k_BKTD), _collect(dv, like=v_BKTD)


def merge(out_BHSD: Tensor, lse_BHS: Tensor, *, piece_BHSD: Tensor, piece_lse_BHS: Tensor) -> None:
    """Take another piece into `out` and `lse`, float32, in place; they start as 0 and -inf.

    out = (e^lse out + e^lse' piece) / (e^lse + e^lse'), in a form that cannot overflow.
    """
    share_BHS1 = torch.sigmoid(piece_lse_BHS - lse_BHS)[..., None]
    out_BHSD.add_(share_BHS1 * (piece_BHSD - out_BHSD))
    torch.logaddexp(lse_BHS, piece_lse_BHS, out=lse_BHS)


def _spread(x_BKTD: Tensor, *, like: Tensor) -> Tensor:
    """Copy each key/value head for the query heads that it serves, on this device alone."""
    return x_BKTD.repeat_interleave(like.shape[1] // x_BKTD.shape[1], dim=1)


def _collect(grad_BHTD: Tensor, *, like: Tensor) -> Tensor:
    """Add up, in float32, the gradients of one key/value head's copies."""
    return grad_BHTD.unflatten(1, (like.shape[1], -1)).float().sum(2)
