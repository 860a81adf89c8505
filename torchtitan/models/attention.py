"""Causal self-attention with grouped queries, and the cache that makes decoding linear.

Everything goes through `scaled_dot_product_attention`: fused kernels on GPU and CPU alike, no
S x S matrix and no mask, ever. Causality is a flag; grouped queries are one too, so keys and values
are not copied once per query head. A decoding step asks with one query about all keys so far, which
needs no mask either. The fused alternatives (FlexAttention, flash-attn) lack a CPU backward or are
one more dependency.

Shapes: B batch (1: one sequence of it), S sequence, T keys so far, C = dim, H query heads, K
key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from functools import partial

import torch
from torch import nn

from torchtitan.models.contract import Attends
from torchtitan.models.document_attention import attend_within, takes_lengths
from torchtitan.models.documents import Documents
from torchtitan.models.rope import Rope
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.window_attention import window_attention


class SequenceCache:
    """Keys and values of the tokens of one sequence that one layer has seen, or what it makes them
    of: two tensors, each with heads and a width of its own.

    The storage is allocated once, for `max_len` tokens, and written in place: for use without
    gradients. What the first tokens bring decides its type and its heads, of which a rank of tensor
    parallelism has its own.
    """

    def __init__(self, max_len: int) -> None:
        self._max_len = max_len
        self._kv: tuple[torch.Tensor, torch.Tensor] | None = None
        self.length = 0

    def append(
        self, k_1KSD: torch.Tensor, v_1KSD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store S more tokens and return the keys and values of all tokens so far."""
        start, stop = self.length, self.length + k_1KSD.shape[2]
        # the causal flag aligns first query with first key: right for a prompt or one token
        assert start == 0 or stop == start + 1, "feed one token after the prompt"
        assert stop <= self._max_len, "the cache is full"
        if self._kv is None:
            self._kv = self._storage(k_1KSD), self._storage(v_1KSD)
        for stored, new in zip(self._kv, (k_1KSD, v_1KSD), strict=True):
            stored[:, :, start:stop] = new
        self.length = stop
        k_1KTD, v_1KTD = (stored[:, :, :stop] for stored in self._kv)
        return k_1KTD, v_1KTD

    def _storage(self, new_1KSD: torch.Tensor) -> torch.Tensor:
        _, num_heads, _, width = new_1KSD.shape
        return new_1KSD.new_empty(1, num_heads, self._max_len, width)


LayerCache = Sequence[SequenceCache]
"""Of one layer, for each sequence of the batch."""


class KVCache:
    """A `LayerCache` for each layer, by the layer's name; `max_lens` are those of the sequences."""

    def __init__(self, config: DecoderConfig, *, max_lens: Sequence[int]) -> None:
        self.layers: dict[str, LayerCache] = {
            str(i): [SequenceCache(n) for n in max_lens] for i in range(config.num_layers)
        }

    def of(self, sequences: Sequence[int]) -> KVCache:
        """Return the same cache, not a copy, for some sequences of the batch."""
        part = copy(self)
        part.layers = {name: [layer[i] for i in sequences] for name, layer in self.layers.items()}
        return part

    @property
    def lengths(self) -> list[int]:
        """Tokens seen so far of each sequence: the position of its next one."""
        return [sequence.length for sequence in next(iter(self.layers.values()))]


def attend_cached(
    q_BHSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    *,
    cache: LayerCache,
    window: int | None = None,
) -> torch.Tensor:
    """Store the new keys and values, and attend to all so far, one sequence after another.

    Sequences of a batch may be of any lengths, and there is neither padding nor a mask. The matrix
    products around it, where decoding spends its time, take the whole batch.
    """
    rows = zip(cache, q_BHSD.split(1), k_BKSD.split(1), v_BKSD.split(1), strict=True)
    return torch.cat(
        [causal_attention(q, *row.append(k, v), window=window) for row, q, k, v in rows]
    )


def causal_attention(
    q_BHSD: torch.Tensor,
    k_BKSD: torch.Tensor,
    v_BKSD: torch.Tensor,
    documents: Documents | None = None,
    *,
    window: int | None = None,
) -> torch.Tensor:
    """Attend from each query to the keys up to its own, or from one query to all keys.

    With `documents` a query sees those of its own document alone, with a window the last `window`
    of them.
    """
    batch, _, num_queries, _ = q_BHSD.shape
    is_cut = window is not None and num_queries > 1 and window < num_queries
    if documents is None and is_cut and takes_lengths(q_BHSD):
        documents = Documents(((num_queries,),) * batch)  # whole sequences
    if documents is not None:
        return attend_within(q_BHSD, k_BKSD, v_BKSD, documents=documents, window=window)
    return window_attention(q_BHSD, k_BKSD, v_BKSD, window=window)


class Attention(Attends):
    """Multi-head attention in which several query heads share one key/value head (GQA).

    `attend` takes the queries, keys and values of the tokens at hand, and the documents that keep
    them apart, if any do. It may be replaced by something that knows of tokens elsewhere; decoding
    has a cache instead.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        q_dim, kv_dim = (n * config.head_width for n in (config.num_heads, config.num_kv_heads))
        self.head_dim, self.width = config.head_width, q_dim
        self.wq = nn.Linear(config.dim, q_dim, bias=config.qkv_bias)
        self.wk = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.wv = nn.Linear(config.dim, kv_dim, bias=config.qkv_bias)
        self.wo = nn.Linear(q_dim, config.dim, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_width, eps=config.norm_eps) if config.qk_norm else None
            for _ in range(2)
        )
        self.window = config.window
        self.attend = (
            causal_attention
            if config.window is None
            else partial(causal_attention, window=config.window)
        )

    def forward(
        self,
        x_BSC: torch.Tensor,
        rope: Rope,
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """Mix the tokens, each with those before it and, if there is a cache, with those in it."""
        # the number of heads is left to -1: tensor parallelism gives each rank a part of them
        q_BSHD = self.wq(x_BSC).unflatten(-1, (-1, self.head_dim))
        k_BSKD = self.wk(x_BSC).unflatten(-1, (-1, self.head_dim))
        v_BSKD = self.wv(x_BSC).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_BSHD, k_BSKD = self.q_norm(q_BSHD), self.k_norm(k_BSKD)
        q_BHSD, k, v = (
            x.transpose(1, 2) for x in (rope.rotate(q_BSHD), rope.rotate(k_BSKD), v_BSKD)
        )
        if cache is None:
            out_BHSD = self.attend(q_BHSD, k, v, documents)
        else:
            out_BHSD = attend_cached(q_BHSD, k, v, cache=cache, window=self.window)
        return self.wo(out_BHSD.transpose(1, 2).flatten(-2))
