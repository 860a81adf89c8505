"""Causal attention inside documents that lie end to end in a sequence.

Two ways, both without a mask. Flash attention has a kernel that takes the tokens of all sequences
in a row and where each document begins: one call, for 16 bits on a GPU. Otherwise attention runs
document by document, which is as fast if they are long, and always exact.

Shapes: B batch, S sequence, H query heads, K key/value heads, D head width, T = B S tokens.
"""

from __future__ import annotations

import inspect
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from torchtitan.base.transfer import to_device
from torchtitan.models.documents import Documents
from torchtitan.models.fused_attention import HALF
from torchtitan.models.window_attention import window_attention

WIDTH_MULTIPLE = 8
"""Of a head, for flash attention on a GPU."""


def attend_within(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    documents: Documents,
    window: int | None = None,
) -> Tensor:
    """Attend from each query to the keys of its own document up to its own, `window` at most."""
    attend = all_at_once if takes_lengths(q_BHSD) else one_by_one
    return attend(q_BHSD, k_BKSD, v_BKSD, documents, window)


def takes_lengths(q_BHSD: Tensor) -> bool:
    """Tell whether the kernel for sequences of different lengths, and windows, can run."""
    fits = q_BHSD.dtype in HALF and q_BHSD.shape[-1] % WIDTH_MULTIPLE == 0
    return q_BHSD.device.type == "cuda" and fits


def one_by_one(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    documents: Documents,
    window: int | None = None,
) -> Tensor:
    """Attend to each document by itself."""
    rows = []
    for lengths, *whole in zip(
        documents.lengths, q_BHSD.split(1), k_BKSD.split(1), v_BKSD.split(1), strict=True
    ):
        # split, not slices: the gradient of each slice would be a tensor of the whole length
        parts = zip(*(x.split(lengths, dim=2) for x in whole), strict=True)
        rows.append(
            torch.cat(
                [window_attention(q, k, v, window=window) for q, k, v in parts],
                dim=2,
            )
        )
    return torch.cat(rows)


def all_at_once(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    documents: Documents,
    window: int | None = None,
) -> Tensor:
    """Attend by flash attention's kernel for sequences of different lengths; not run yet."""
    grouped = {}
    if k_BKSD.shape[1] != q_BHSD.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:  # torch 2.11
            group = q_BHSD.shape[1] // k_BKSD.shape[1]
            k_BKSD, v_BKSD = (x.repeat_interleave(group, dim=1) for x in (k_BKSD, v_BKSD))
    begins = documents.remember("begins", lambda: _begins(documents, q_BHSD.device))
    longest = max(max(row) for row in documents.lengths)
    before = -1 if window is None else window - 1
    q_THD, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSD, k_BKSD, v_BKSD))
    # the same `begins` twice: torch 2.15 takes cuDNN's kernel only where it can see they are equal
    out_THD: Tensor = varlen_attn(
        q_THD, k, v, begins, begins, longest, longest, window_size=(before, 0), **grouped
    )
    return out_THD.unflatten(0, (len(q_BHSD), -1)).transpose(1, 2)


def _begins(documents: Documents, device: torch.device) -> Tensor:
    """Return where each document begins in the row of all tokens, and T, int32."""
    lengths = (length for row in documents.lengths for length in row)
    return to_device(list(accumulate(lengths, initial=0)), device).int()
