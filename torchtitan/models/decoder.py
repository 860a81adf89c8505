"""The decoder-only transformer: one plain module that calls nothing parallel.

Parameter names are torchtitan's, so that checkpoints interchange. Every parallel layout is applied
to this module from outside. So it holds no buffers (nothing to move, cast or re-create after meta
construction), and a block maps `(x, rope)` to `x`, so that activation checkpointing, compilation
and sharding can wrap it. A pipeline stage is this module with the rest removed (`keep_only`);
`layers` is a dictionary keyed by number, so that a stage with layers 8 to 15 keeps their names.

Shapes: B batch, S sequence, C = dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import nn

from torchtitan.models.attention import Attention, KVCache, LayerCache
from torchtitan.models.contract import CastsWeights, LanguageModel
from torchtitan.models.documents import Documents
from torchtitan.models.rope import Rope, build_rope
from torchtitan.models.sizes import DecoderConfig


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)

    def forward(self, x_BSC: torch.Tensor) -> torch.Tensor:
        """Transform each token by itself."""
        return self.w2(F.silu(self.w1(x_BSC)) * self.w3(x_BSC))


class Block(nn.Module):
    """Attention and feed-forward, each behind a norm and added to the residual stream."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.feed_forward = FeedForward(config)

    def forward(
        self,
        x_BSC: torch.Tensor,
        rope: Rope,
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> torch.Tensor:
        """Apply the block; only decoding has a cache."""
        x_BSC = x_BSC + self.attention(self.attention_norm(x_BSC), rope, documents, cache)
        return x_BSC + self.feed_forward(self.ffn_norm(x_BSC))


HeadLoss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""From the head's input (B, S, C), its weight (V, C) and labels (B, S) to the summed loss."""


class Output(nn.Linear, CastsWeights):
    """The output head: logits or, given labels, the loss.

    The head computes the loss, so that the logits of a long sequence never exist all at once. The
    trainer sets `loss`.
    """

    loss: HeadLoss

    def forward(self, x_BSC: torch.Tensor, labels_BS: torch.Tensor | None = None) -> torch.Tensor:
        """Return the logits, or the summed loss, a scalar in float32."""
        if labels_BS is None:
            return F.linear(x_BSC, self.weight.to(x_BSC.dtype))
        return self.loss(x_BSC, self.weight, labels_BS)


class TiedOutput(nn.Module):
    """The same without a weight of its own: it is given the embedding's."""

    loss: HeadLoss

    def forward(
        self, x_BSC: torch.Tensor, weight_VC: torch.Tensor, labels_BS: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the logits, or the summed loss."""
        if labels_BS is None:
            return F.linear(x_BSC, weight_VC.to(x_BSC.dtype))
        return self.loss(x_BSC, weight_VC, labels_BS)


class Decoder(LanguageModel):
    """Tokens to logits, or one pipeline stage of the way.

    With tied embeddings there is no `output.weight`: a parameter under two names would be untied by
    meta construction with `to_empty()`. The head then multiplies by `tok_embeddings.weight` outside
    that module's own forward, so a parallel layer must keep `tok_embeddings` in the root's FSDP
    group (gathered for the whole forward) and never shard it as a group of its own.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = (
            TiedOutput()
            if config.tie_embeddings
            else Output(config.dim, config.vocab_size, bias=False)
        )

    def forward(
        self,
        tokens_BS: torch.Tensor,
        positions: torch.Tensor | None = None,
        documents: Documents | None = None,
        labels: torch.Tensor | None = None,
        cache: KVCache | None = None,
    ) -> torch.Tensor:
        """Return the logits of the token after each one, in the dtype of the computation.

        With labels it returns their summed loss instead, float32. `positions` (int64, (S) or (B,
        S)) are the tokens' places in the sequence; by default they follow what the cache holds, or
        start at 0. `documents` keep attention inside them. A pipeline stage takes the (B, S, C)
        residual stream of the stage before it in the place of the tokens, then needs positions, and
        returns the stream unless it has the head. With a cache it returns only the logits after the
        last token, (B, 1, V): those of a long prompt would be large.
        """
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            if cache is not None:
                lengths_B = torch.tensor(cache.lengths, device=tokens_BS.device)
                positions = positions + lengths_B[:, None]
        rope = build_rope(
            positions,
            head_dim=self.config.head_width,
            theta=self.config.rope_theta,
            scaling=self.config.rope_scaling,
        )
        x_BSC = tokens_BS
        if self.tok_embeddings is not None and not self.embedding_is_copy:
            x_BSC = self.tok_embeddings(tokens_BS)
        for name, block in self.layers.items():
            x_BSC = block(x_BSC, rope, documents, None if cache is None else cache.layers[name])
        if self.norm is None or self.output is None:
            return x_BSC
        x_BSC = self.norm(x_BSC if cache is None else x_BSC[:, -1:])
        if isinstance(self.output, TiedOutput):
            assert self.tok_embeddings is not None
            return self.output(x_BSC, self.tok_embeddings.weight, labels)
        return self.output(x_BSC, labels)
