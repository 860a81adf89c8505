"""Causal self-attention: grouped queries, documents and windows. Decoding is in `cache.py`.

Everything runs through fused kernels, on GPU and CPU alike, so that no S x S matrix of scores and
no S x S mask is ever in memory. Causality and grouped queries are flags of
`scaled_dot_product_attention`. The alternatives, FlexAttention and flash-attn, lack a CPU backward
or are one more dependency.

Documents that are packed into one sequence do not attend to each other. On a GPU in 16 bits, flash
attention's variable-length kernel takes all sequences in one call, with the start of each document.
Otherwise attention runs document by document, which is equally fast if they are long.

A window (arXiv:2004.05150) limits each query to the last W keys. The variable-length kernel has it
as an argument. Otherwise the first W queries run as plain causal attention, and the remaining ones
in blocks of b queries, each with its W + b - 1 keys and a mask of that size. So memory and work
grow with S x W.

Shapes: B batch (1: one sequence of it), S sequence, T keys, C = dim, H query heads, K key/value
heads, D head width, N = B S tokens.
"""

from __future__ import annotations

import inspect
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn

from torchtitan.base.device import to_device
from torchtitan.models.interface import AttentionModule, CastsWeights, Documents
from torchtitan.models.kernels import Band, attend_with_sinks
from torchtitan.models.norms import build_norm
from torchtitan.models.rope import Rope
from torchtitan.models.sizes import DecoderConfig

if TYPE_CHECKING:
    from torchtitan.models.cache import LayerCache

HALF_DTYPES = (torch.bfloat16, torch.float16)
VARLEN_HEAD_MULTIPLE = 8
"""The variable-length kernel needs heads of a multiple of this width."""
MIN_WINDOW_BLOCK = 256
"""Least number of queries per block of windowed attention."""


class Sinks(nn.Module, CastsWeights):
    """A score of each head that a softmax sums beside those of the keys, with the value 0."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_heads))

    def forward(self) -> Tensor:
        """Return the scores (H)."""
        return self.weight


class Attention(AttentionModule):
    """Multi-head attention with grouped queries (GQA): query heads share key/value heads."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        q_dim, kv_dim = (n * config.head_width for n in (config.num_heads, config.num_kv_heads))
        self.head_dim, self.width = config.head_width, q_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(q_dim, config.dim, bias=config.wo_bias)
        self.joint_norm, has_norm = config.joint_qk_norm, config.joint_qk_norm or config.qk_norm
        self.q_norm, self.k_norm = (
            build_norm(config, width if self.joint_norm else config.head_width)
            if has_norm
            else None
            for width in (q_dim, kv_dim)
        )
        scale = config.attention_scale
        self.q_scale = 1.0 if scale is None else scale * config.head_width**0.5
        self.sinks = Sinks(config.num_heads) if config.has_sinks else None
        self.window = config.window
        self.attend = partial(causal_attention, window=config.window)

    def forward(
        self,
        x_BSC: Tensor,
        rope: Rope,
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from each token to those before it, including cached ones."""
        q, k = self.wq(x_BSC), self.wk(x_BSC)
        if self.joint_norm:
            q, k = self._normalize(q, k)
        # heads are -1 because tensor parallelism gives each rank some of them
        q_BSHD = q.unflatten(-1, (-1, self.head_dim))
        k_BSKD = k.unflatten(-1, (-1, self.head_dim))
        v_BSKD = self.wv(x_BSC).unflatten(-1, (-1, self.head_dim))
        if not self.joint_norm:
            q_BSHD, k_BSKD = self._normalize(q_BSHD, k_BSKD)
        if self.q_scale != 1.0:
            q_BSHD = q_BSHD * self.q_scale
        q_BHSD, k, v = (x.transpose(1, 2) for x in (*rope.rotate(q_BSHD, k_BSKD), v_BSKD))
        sinks = [] if self.sinks is None else [self.sinks()]
        if cache is None:
            out_BHSD = self.attend(q_BHSD, k, v, documents, *sinks)
        else:
            keys_values = cache.append(k, v)
            out_BHSD = cache.attend(
                q_BHSD, *keys_values, *sinks, attend_prompts=self.attend, window=self.window
            )
        return self.wo(out_BHSD.transpose(1, 2).flatten(-2))

    def _normalize(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        if self.q_norm is None or self.k_norm is None:
            return q, k
        return self.q_norm(q), self.k_norm(k)


def causal_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    documents: Documents | None = None,
    sinks_H: Tensor | None = None,
    *,
    window: int | None = None,
) -> Tensor:
    """Attend from each query to the keys up to its own position.

    Documents do not attend to each other. `window` is the number of keys per query, itself
    included.
    """
    if sinks_H is not None:
        return document_attention(q_BHSD, k_BKSD, v_BKSD, documents, window, sinks_H)
    batch, _, num_queries, _ = q_BHSD.shape
    is_windowed = window is not None and window < num_queries
    if documents is None and is_windowed and can_use_varlen(q_BHSD):
        documents = Documents(((num_queries,),) * batch)  # each sequence is one document
    if documents is not None and can_use_varlen(q_BHSD):
        return varlen_attention(q_BHSD, k_BKSD, v_BKSD, documents, window)
    return document_attention(q_BHSD, k_BKSD, v_BKSD, documents, window)


def can_use_varlen(q_BHSD: Tensor) -> bool:
    """Return whether the variable-length kernel supports these queries."""
    fits = q_BHSD.dtype in HALF_DTYPES and q_BHSD.shape[-1] % VARLEN_HEAD_MULTIPLE == 0
    return q_BHSD.device.type == "cuda" and fits


def document_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    documents: Documents | None,
    window: int | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend within each document, one after another.

    `window` is the number of keys per query, itself included.
    """
    attend = partial(window_attention, window=window, sinks_H=sinks_H)
    if documents is None:
        return attend(q_BHSD, k_BKSD, v_BKSD)
    rows = []
    for lengths, *sequence in zip(
        documents.lengths, q_BHSD.split(1), k_BKSD.split(1), v_BKSD.split(1), strict=True
    ):
        # split, not slices: the gradient of each slice would be a tensor of the full length
        parts = zip(*(x.split(lengths, dim=2) for x in sequence), strict=True)
        rows.append(torch.cat([attend(q, k, v) for q, k, v in parts], dim=2))
    return torch.cat(rows)


def varlen_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    documents: Documents,
    window: int | None = None,
) -> Tensor:
    """Attend within each document by flash attention's variable-length kernel.

    `window` is the number of keys per query, itself included.
    """
    grouped = {}
    if k_BKSD.shape[1] != q_BHSD.shape[1]:
        if "enable_gqa" in inspect.signature(varlen_attn).parameters:
            grouped = {"enable_gqa": True}
        else:  # torch 2.11
            group = q_BHSD.shape[1] // k_BKSD.shape[1]
            k_BKSD, v_BKSD = (x.repeat_interleave(group, dim=1) for x in (k_BKSD, v_BKSD))
    starts = documents.cached("starts", lambda: _flat_starts(documents, q_BHSD.device))
    longest = max(max(row) for row in documents.lengths)
    before = -1 if window is None else window - 1
    q_NHD, k, v = (x.transpose(1, 2).flatten(0, 1) for x in (q_BHSD, k_BKSD, v_BKSD))
    # the same `starts` twice: torch 2.15 uses cuDNN's kernel only where it can see they are equal
    out_NHD: Tensor = varlen_attn(
        q_NHD, k, v, starts, starts, longest, longest, window_size=(before, 0), **grouped
    )
    return out_NHD.unflatten(0, (len(q_BHSD), -1)).transpose(1, 2)


def _flat_starts(documents: Documents, device: torch.device) -> Tensor:
    """Return the start of each document in the row of all N tokens, then N, int32."""
    lengths = (length for row in documents.lengths for length in row)
    return to_device(list(accumulate(lengths, initial=0)), device).int()


def window_attention(
    q_BHSD: Tensor,
    k_BKSD: Tensor,
    v_BKSD: Tensor,
    *,
    window: int | None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Attend from each query to the last `window` keys up to its own."""
    seq_len = q_BHSD.shape[2]
    if window is None or seq_len <= window:
        return fused_attention(q_BHSD, k_BKSD, v_BKSD, is_causal=seq_len > 1, sinks_H=sinks_H)
    block = window_block(window)
    first, *blocks = q_BHSD.split(
        [window, *(min(block, seq_len - at) for at in range(window, seq_len, block))], dim=2
    )
    keys = slice(None), slice(None), slice(0, window)
    attend = partial(fused_attention, sinks_H=sinks_H)
    outs = [attend(first, k_BKSD[keys], v_BKSD[keys], is_causal=window > 1)]
    stop = window
    for q in blocks:
        start, stop = stop, stop + q.shape[2]
        keys = slice(None), slice(None), slice(start - window + 1, stop)
        # of these keys the first query sees 0 to W - 1, and each next query one further
        outs.append(attend(q, k_BKSD[keys], v_BKSD[keys], band=(0, window - 1)))
    return torch.cat(outs, dim=2)


def window_block(window: int) -> int:
    """Return the largest number of queries per block of windowed attention."""
    return max(MIN_WINDOW_BLOCK, window // 4)


def fused_attention(
    q_BHSD: Tensor,
    k_BKTD: Tensor,
    v_BKTD: Tensor,
    *,
    is_causal: bool = False,
    band: Band | None = None,
    sinks_H: Tensor | None = None,
) -> Tensor:
    """Call PyTorch's attention such that a fused kernel runs.

    On CUDA the flash kernel supports only 16 bits, and the memory-efficient kernel, which supports
    float32, has no grouped query heads. PyTorch would silently use a third kernel, with S x S
    scores. So grouped heads in float32 are repeated.

    `band` are the keys that each query attends to. Default: all.
    """
    if sinks_H is not None:
        return attend_with_sinks(q_BHSD, k_BKTD, v_BKTD, sinks_H, causal=is_causal, band=band)
    mask_ST = None
    if band is not None:
        shape = q_BHSD.shape[2], k_BKTD.shape[2]
        mask_ST = torch.ones(shape, dtype=torch.bool, device=q_BHSD.device)
        mask_ST = mask_ST.tril(band[1]).triu(band[0])
    group = q_BHSD.shape[1] // k_BKTD.shape[1]
    if group > 1 and q_BHSD.device.type == "cuda" and q_BHSD.dtype not in HALF_DTYPES:
        k_BKTD, v_BKTD = (x.repeat_interleave(group, dim=1) for x in (k_BKTD, v_BKTD))
        group = 1
    return F.scaled_dot_product_attention(
        q_BHSD, k_BKTD, v_BKTD, attn_mask=mask_ST, is_causal=is_causal, enable_gqa=group > 1
    )
