"""The decoder-only transformer, as one plain module that calls nothing parallel.

Parameter names are torchtitan 0.2's: checkpoints interchange. Every parallel layout is applied
to this module from outside. For this purpose it holds no buffers (nothing to move, cast or
re-create after meta construction), and a block maps `(x, rope, ...)` to `x`, so that activation
checkpointing, compilation and sharding can wrap it. A pipeline stage is this module with the other
parts removed (`prune_to_stage`). `layers` is a dictionary by number, so that a stage with layers 8
to 15 keeps their names.

Shapes: B batch, S sequence, C = dim, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.attention import Attention
from torchtitan.models.interface import Documents, LanguageModel, Output, TiedOutput
from torchtitan.models.norms import build_norm
from torchtitan.models.rope import Rope, build_rope
from torchtitan.models.sizes import DecoderConfig

if TYPE_CHECKING:
    from torchtitan.models.cache import KVCache, LayerCache


class _SwiGLU(torch.autograd.Function):
    """silu(gate) * up. Only these two are kept: backward computes silu(gate) again."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return F.silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        (gate, up), (grad,) = ctx.saved_tensors, grads
        return torch.ops.aten.silu_backward(grad * up, gate), grad * F.silu(gate)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return silu(gate) * up. A compiler chooses by itself what it keeps."""
    if torch.compiler.is_compiling():
        return F.silu(gate) * up
    if not torch.is_grad_enabled():
        return F.silu(gate).mul_(up)
    product: Tensor = _SwiGLU.apply(gate, up)
    return product


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return gelu(gate) * up, in the tanh approximation."""
    return F.gelu(gate, approximate="tanh") * up


class FeedForward(nn.Module):
    """SwiGLU (arXiv:2002.05202): w2(silu(w1 x) * w3 x). GeGLU has gelu in place of silu."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)
        self.w3 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.activate = swiglu if config.activation == "silu" else geglu

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Transform each token independently."""
        return self.w2(self.activate(self.w1(x_BSC), self.w3(x_BSC)))


class Block(nn.Module):
    """Attention and feed-forward, each with a residual connection, and a norm before it, after it
    or both."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        has_pre, has_post = config.norm_placement != "post", config.norm_placement != "pre"
        self.attention_norm = build_norm(config) if has_pre else nn.Identity()
        self.attention = Attention(config)
        self.post_attention_norm = build_norm(config) if has_post else nn.Identity()
        self.ffn_norm = build_norm(config) if has_pre else nn.Identity()
        self.feed_forward = FeedForward(config)
        self.post_ffn_norm = build_norm(config) if has_post else nn.Identity()
        self.scale = config.residual_scale or 1

    def forward(
        self,
        x_BSC: Tensor,
        rope: Rope,
        documents: Documents | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Apply the block. Only decoding passes a cache."""
        # a variable would keep the summand in memory until the block returns
        x_BSC = torch.add(
            x_BSC,
            self.post_attention_norm(
                self.attention(self.attention_norm(x_BSC), rope, documents, cache)
            ),
            alpha=self.scale,
        )
        return torch.add(
            x_BSC, self.post_ffn_norm(self.transform(self.ffn_norm(x_BSC))), alpha=self.scale
        )

    def transform(self, x_BSC: Tensor) -> Tensor:
        """Transform each token independently."""
        return self.feed_forward(x_BSC)


class Decoder(LanguageModel):
    """The transformer from tokens to logits, or one pipeline stage of it.

    Tied embeddings have no `output.weight`, because a parameter under two names would be
    untied by meta construction with `to_empty()`. The head then multiplies by
    `tok_embeddings.weight` outside that module's own forward. So `tok_embeddings` must stay in the
    root's FSDP group, which is gathered for the entire forward, and never form a group of its own.
    """

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        sizes = [
            config.of_layer_type(config.layer_type(layer)) for layer in range(config.num_layers)
        ]
        blocks = {str(layer): self.build_block(layer, own) for layer, own in enumerate(sizes)}
        self.layers = nn.ModuleDict(blocks)
        self.norm = build_norm(config)
        self.output = (
            TiedOutput()
            if config.tie_embeddings
            else Output(config.dim, config.vocab_size, bias=False)
        )

    def build_block(self, layer: int, sizes: DecoderConfig) -> Block:
        """Return the block of a layer with these sizes."""
        return Block(sizes)

    def forward(
        self,
        tokens_BS: Tensor,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        labels: Tensor | None = None,
        cache: KVCache | None = None,
    ) -> Tensor:
        """Return the logits in the dtype of the computation, or the summed loss in float32.

        A pipeline stage returns the residual stream (B, S, C) unless it has the head.

        Args:
            tokens_BS: Token ids. A stage without the embedding takes the residual stream instead.
            positions: Positions of the tokens, int64 (S) or (B, S). By default they continue the
                cache or start at 0. A stage without the embedding needs them.
            documents: Documents that attention keeps apart.
            labels: Next tokens (B, S). With labels the loss is returned.
            cache: Keys and values of earlier tokens. With a cache only the logits of the last token
                of each sequence are returned, because the logits of a long prompt would be large:
                (1, P, V) for P prompts in one row, then (B, 1, V).
        """
        if positions is None:
            positions = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
            if cache is not None:
                positions = torch.tensor(cache.positions, device=tokens_BS.device)
        x_BSC = tokens_BS
        if self.tok_embeddings is not None and not self.embedding_is_copy:
            x_BSC = self.tok_embeddings(tokens_BS)
            if (factor := self.config.embedding_factor) != 1.0:
                x_BSC = x_BSC * x_BSC.new_full((), factor)  # rounded like the rows
        ropes: dict[str, Rope] = {}
        for name, block in self.layers.items():
            layer_type = self.config.layer_type(int(name))
            if layer_type not in ropes:
                ropes[layer_type] = self._build_rope(positions, layer_type)
            layer_cache = None if cache is None else cache.layers[name]
            x_BSC = block(x_BSC, ropes[layer_type], documents, layer_cache)
        if self.norm is None or self.output is None:
            return x_BSC
        x_BSC = self.norm(x_BSC if cache is None else x_BSC[:, cache.ends])
        if self.config.logits_divisor is not None:
            x_BSC = x_BSC / self.config.logits_divisor
        return self.head(x_BSC, labels)

    def _build_rope(self, positions: Tensor, layer_type: str) -> Rope:
        sizes = self.config.of_layer_type(layer_type)
        return build_rope(
            positions if layer_type != "N" else torch.zeros_like(positions),
            head_dim=sizes.rotary_dim,
            theta=sizes.rope_theta,
            scaling=sizes.rope_scaling,
        )
