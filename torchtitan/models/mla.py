"""Multi-head latent attention: keys and values are made of one narrow vector per token.

A token's latent determines its keys and values (arXiv:2405.04434), except for a few key channels
that are rotated and shared by all heads. So decoding caches kv_lora_rank + qk_rope_head_dim numbers
per token and layer: 576 in DeepSeek-V3, where keys and values of 128 heads are 40,960. Queries may
be made of a latent of their own, to save parameters.

Each decoding step expands the cached latents to keys and values. The alternative multiplies queries
and results by the two halves of wkv_b instead, and attends to the latents themselves. That is less
work per step, but it reads a weight that an adapter or tensor parallelism may have replaced.

Value heads are narrower than those of queries and keys, which few attention kernels support, and
none that shards the sequence. So the narrower ones are padded with zeros, and the result is cut.

Shapes: B batch (1: also one head), S sequence, C = dim, H heads, E any width, D the wider of a key
and a value head, R = kv_lora_rank, P = qk_rope_head_dim.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import causal_attention
from torchtitan.models.interface import AttentionModule, Documents
from torchtitan.models.rope import Rope
from torchtitan.models.sizes import MLAConfig

if TYPE_CHECKING:
    from torchtitan.models.cache import LayerCache

LATENT_EPS = 1e-6
"""Added to the mean square in the norms of latents. DeepSeek's code has no setting for it."""


class LatentAttention(AttentionModule):
    """Attention with keys and values made of one latent per token.

    `width` is the mean of the total widths of key heads and of value heads: scores cost as much as
    the former, and their products with values as the latter.
    """

    def __init__(self, config: MLAConfig) -> None:
        super().__init__()
        dim, heads, rank = config.dim, config.num_heads, config.q_lora_rank
        self.nope_dim, self.rope_dim = config.qk_nope_head_dim, config.qk_rope_head_dim
        self.v_dim, self.kv_rank = config.v_head_dim, config.kv_lora_rank
        qk = self.nope_dim + self.rope_dim
        self.width = heads * (qk + self.v_dim) // 2
        self.has_latent_queries = rank is not None
        if rank is None:
            self.wq = nn.Linear(dim, heads * qk, bias=False)
        else:
            self.wq_a = nn.Linear(dim, rank, bias=False)
            self.q_norm = nn.RMSNorm(rank, eps=LATENT_EPS)
            self.wq_b = nn.Linear(rank, heads * qk, bias=False)
        self.wkv_a = nn.Linear(dim, self.kv_rank + self.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(self.kv_rank, eps=LATENT_EPS)
        self.wkv_b = nn.Linear(self.kv_rank, heads * (self.nope_dim + self.v_dim), bias=False)
        self.wo = nn.Linear(heads * self.v_dim, dim, bias=False)
        self.k_pe = nn.Identity()  # shared by all heads: tensor parallelism gathers it here
        # kernels divide the scores by the root of the padded width
        self.head_dim = max(qk, self.v_dim)
        self.q_scale = (self.head_dim / qk) ** 0.5
        if config.rope_scaling is not None:
            self.q_scale *= config.rope_scaling.score_growth
        self.attend = causal_attention

    def forward(
        self,
        x_BSC: Tensor,
        rope: Rope,
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Attend from each token to those before it, including cached ones."""
        q_BHSD = self.queries(x_BSC, rope)
        latent_BSR, k_pe_BSP = self.wkv_a(x_BSC).split((self.kv_rank, self.rope_dim), -1)
        latent_B1SR = self.kv_norm(latent_BSR)[:, None]
        k_pe_B1SP = rope.rotate(self.k_pe(k_pe_BSP)[:, :, None])[0].transpose(1, 2)
        if cache is None:
            out_BHSD = self.attend(q_BHSD, *self.expand(latent_B1SR, k_pe_B1SP), documents)
        else:
            stored = cache.append(latent_B1SR, k_pe_B1SP)
            keys_values = self.expand(*stored)
            out_BHSD = cache.attend(q_BHSD, *keys_values, attend_prompts=self.attend)
        return self.wo(out_BHSD[..., : self.v_dim].transpose(1, 2).flatten(-2))

    def queries(self, x_BSC: Tensor, rope: Rope) -> Tensor:
        """Return the queries of all heads (B, H, S, D), with their last channels rotated.

        They include the factor on the scores, so that attention kernels need no change.
        """
        latent = self.q_norm(self.wq_a(x_BSC)) if self.has_latent_queries else x_BSC
        q_BSE = self.wq_b(latent) if self.has_latent_queries else self.wq(x_BSC)
        # heads are -1 because tensor parallelism gives each rank some of them
        q_BSHE = q_BSE.unflatten(-1, (-1, self.nope_dim + self.rope_dim))
        nope_BSHE, pe_BSHP = q_BSHE.split((self.nope_dim, self.rope_dim), -1)
        q_BSHE = torch.cat((nope_BSHE, *rope.rotate(pe_BSHP)), -1)
        if self.q_scale != 1.0:
            q_BSHE = q_BSHE * self.q_scale
        return self._pad_heads(q_BSHE.transpose(1, 2))

    def expand(self, latent_B1SR: Tensor, k_pe_B1SP: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of all heads (B, H, S, D) from normalized latents."""
        kv_BSHE = self.wkv_b(latent_B1SR[:, 0]).unflatten(-1, (-1, self.nope_dim + self.v_dim))
        nope_BHSE, v_BHSE = kv_BSHE.transpose(1, 2).split((self.nope_dim, self.v_dim), -1)
        k_pe_BHSP = k_pe_B1SP.expand(-1, nope_BHSE.shape[1], -1, -1)
        return self._pad_heads(torch.cat((nope_BHSE, k_pe_BHSP), -1)), self._pad_heads(v_BHSE)

    def _pad_heads(self, x_BHSE: Tensor) -> Tensor:
        missing = self.head_dim - x_BHSE.shape[-1]
        return F.pad(x_BHSE, (0, missing)) if missing else x_BHSE
