"""Causal attention in which a query sees the last few keys alone: its window (arXiv:2004.05150).

The first queries, whose windows begin at the first key, run as plain causal attention. The others
run block by block, each block with its own stretch of keys, W + b - 1 of them for b queries, and a
mask of that size; memory and work grow with S x W. Flash attention's kernel for 16 bits on a GPU
takes a window itself: `document_attention.py` calls it.

Shapes: B batch, H query heads, K key/value heads, S queries, T keys, D head width, W window.
"""

from __future__ import annotations

import torch
from torch import Tensor

from torchtitan.models.fused_attention import fused_attention

SMALLEST_BLOCK = 256
"""Queries of a block; a quarter of a window if that is more."""


def window_attention(
    q_BHSD: Tensor, k_BKTD: Tensor, v_BKTD: Tensor, *, window: int | None
) -> Tensor:
    """Attend from each query to the keys up to its own, or from one query to all of the cache.

    With a window it sees the last `window` of these.
    """
    num_queries, num_keys = q_BHSD.shape[2], k_BKTD.shape[2]
    if window is None or num_keys <= window:
        return fused_attention(q_BHSD, k_BKTD, v_BKTD, is_causal=num_queries > 1)
    if num_queries == 1:
        return fused_attention(q_BHSD, k_BKTD[:, :, -window:], v_BKTD[:, :, -window:])
    assert num_queries == num_keys, "one query, or all"
    block = max(SMALLEST_BLOCK, window // 4)
    first, *others = q_BHSD.split(
        [window, *(min(block, num_keys - at) for at in range(window, num_keys, block))], dim=2
    )
    keys = slice(None), slice(None), slice(0, window)
    outs = [fused_attention(first, k_BKTD[keys], v_BKTD[keys], is_causal=window > 1)]
    stop = window
    for q in others:
        start, stop = stop, stop + q.shape[2]
        keys = slice(None), slice(None), slice(start - window + 1, stop)
        # the first query's window is keys 0 to W - 1 of these, each next one's lies one further
        shape = stop - start, stop - start + window - 1
        mask_ST = torch.ones(shape, dtype=torch.bool, device=q.device).tril(window - 1).triu()
        outs.append(fused_attention(q, k_BKTD[keys], v_BKTD[keys], mask_ST=mask_ST))
    return torch.cat(outs, dim=2)
