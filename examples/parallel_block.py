"""A custom model: parallel attention and GELU feed-forward after one norm.

    python -m torchtitan.train --model.name examples.parallel_block:SPEC --model.flavor tiny \
        --model.tokenizer_path byte --training.steps 20

The parts around the blocks are the decoder's, so it also runs in pipeline stages and generates
text. `TENSOR_PLAN` defines how tensor parallelism splits a block; without it, tensor parallelism is
refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models import llama3
from torchtitan.models.attention import Attention
from torchtitan.models.decoder import Decoder
from torchtitan.models.init import Constant, Init, Normal
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec


@dataclass(frozen=True, kw_only=True)
class Sizes(DecoderConfig):
    """A decoder's sizes and one more. Each is a key of [model]."""

    branch_scale: float = 0.7
    """Factor on what a block adds to the stream."""


class FeedForward(nn.Module):
    """GELU between two matrices."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.hidden_dim, bias=False)
        self.w2 = nn.Linear(config.hidden_dim, config.dim, bias=False)

    def forward(self, x_BSC: Tensor) -> Tensor:
        """Map each token independently."""
        return self.w2(F.gelu(self.w1(x_BSC)))


class SideBySide(nn.Module):
    """A block: both branches read the same normed input."""

    def __init__(self, config: Sizes) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.feed_forward = FeedForward(config)
        self.scale = config.branch_scale

    def forward(self, x_BSC: Tensor, *others: Any) -> Tensor:
        """Add both branches to the residual stream. `others` are further inputs of attention."""
        y_BSC = self.norm(x_BSC)
        return x_BSC + self.scale * (self.attention(y_BSC, *others) + self.feed_forward(y_BSC))


class Parallel(Decoder):
    """The decoder with parallel blocks."""

    def __init__(self, config: Sizes) -> None:
        super().__init__(config)
        self.layers = nn.ModuleDict({name: SideBySide(config) for name in self.layers})

    def initial(self, name: str) -> Init:
        """Return the initialization of a parameter."""
        return Constant(1.0) if "norm." in name else Normal(std=0.02)


TENSOR_PLAN = {
    **{name: role for name, role in llama3.TENSOR_PLAN.items() if "norm" not in name},
    "layers.*.norm": "norm",
    "norm": "norm",
}
del TENSOR_PLAN["layers.*.feed_forward.w3"]
TINY = Sizes(dim=32, num_layers=4, num_heads=8, num_kv_heads=4, hidden_dim=96, vocab_size=264)
SPEC = ModelSpec(
    name="parallel_block",
    flavors={"tiny": TINY},
    build=Parallel,
    tensor_plan=TENSOR_PLAN,
    stages=True,
)
