"""PyTorch's attention, restricted to kernels that hold no matrix of scores.

Of the fused kernels for CUDA, flash supports only 16 bits, and the memory-efficient one, which
supports float32, has no grouped query heads. With grouped heads in float32 PyTorch silently uses a
third kernel, which holds S x S scores. So there each key/value head is copied for the query heads
that it serves. Read in PyTorch's sources, not seen on a GPU.

Shapes: B batch, H query heads, K key/value heads, S queries, T keys, D head width.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def fused_attention(
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    is_causal: bool = False,
    mask_ST: Tensor | None = None,
) -> Tensor:
    """Attend from each query to all keys, to those up to its own place, or to those of a mask."""
    group = q_BHSD.shape[1] // k_BKTD.shape[1]
    if group > 1 and q_BHSD.device.type == "cuda" and q_BHSD.dtype not in HALF:
        k_BKTD, v_BKTD = (x.repeat_interleave(group, dim=1) for x in (k_BKTD, v_BKTD))
        group = 1
    return F.scaled_dot_product_attention(
        q_BHSD, k_BKTD, v_BKTD, attn_mask=mask_ST, is_causal=is_causal, enable_gqa=group > 1
    )
