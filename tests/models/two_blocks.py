"""A family whose layers are of two classes in turn: Llama's block, and a gated one of its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from torchtitan.models import llama3
from torchtitan.models.attention import Attention
from torchtitan.models.init import Constant, Init, Normal
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec


class Gated(nn.Module):
    """Attention behind a norm, each channel of it gated."""

    def __init__(self, config: DecoderConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config)
        self.gate = nn.Linear(config.dim, config.dim)

    def forward(self, x_BSC: Tensor, *others: Any) -> Tensor:
        y_BSC = self.attention_norm(x_BSC)
        return x_BSC + torch.sigmoid(self.gate(y_BSC)) * self.attention(y_BSC, *others)


class TwoKinds(llama3.Llama3):
    def __init__(self, config: DecoderConfig) -> None:
        super().__init__(config)
        for name in list(self.layers)[1::2]:
            self.layers[name] = Gated(config)

    def initial(self, name: str) -> Init:
        match name.split("."):
            case [_, _, "gate", "weight"]:
                return Normal(std=0.2)
            case [_, _, "gate", "bias"]:
                return Constant(0.5)
        return super().initial(name)


SPEC = ModelSpec(
    name="two_kinds",
    flavors={"tiny": replace(llama3.FLAVORS["tiny"], num_layers=4)},
    build=TwoKinds,
    stages=True,
)
