"""Computing in bfloat16 from float32 weights, on one rank.

FSDP2 does this where weights are gathered, and on one rank as well: but there it copies a gradient
three times, into the buffer of a reduction that has nobody to reduce with, divided, and out of it.
Here each module casts its weight where it uses it, and autograd casts the gradient back: one pass
each way. Weights, gradients and the optimizer's state stay float32, microbatches add up in float32,
and every product is computed of the same bfloat16 numbers as under FSDP2.

Two weights are used without a cast of the whole. The embedding's rows are cast after they are
looked up, and the head's loss takes the float32 weight and leaves a float32 gradient
(`optim/loss.py`); where FSDP2 would round both gradients to bfloat16, a token's many uses included,
here they stay exact.

Autocast is the alternative, but it has rules of its own (norms and the residual stream become
float32), hence another model than the one that many ranks train.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.decoder import Output
from torchtitan.models.lora import LoRALinear


class _Linear(nn.Linear):
    """A linear layer in the type of its input."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class _LoRALinear(LoRALinear):
    """A linear layer and its low-rank factors in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        a_RI, b_OR = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype)) + self.scale * self.low_rank(x, a_RI, b_OR)


class _RMSNorm(nn.RMSNorm):
    """A norm in the type of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


# modules that have weights; the class is all that changes: names and parameters stay
CASTING: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear,
    LoRALinear: _LoRALinear,
    nn.RMSNorm: _RMSNorm,
    nn.Embedding: nn.Embedding,
    Output: Output,
}


def _with_weights(model: nn.Module) -> list[nn.Module]:
    return [m for m in model.modules() if next(m.parameters(recurse=False), None) is not None]


def can_compute_in(model: nn.Module) -> bool:
    """Tell whether every module of `model` that has weights is of a kind that is known here."""
    return all(type(module) in CASTING for module in _with_weights(model))


def compute_in(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Let `model` compute in `dtype`, in place, whatever its weights are stored in."""
    for module in _with_weights(model):
        module.__class__ = CASTING[type(module)]

    def cast_rows(module: nn.Module, args: Any, rows: Tensor) -> Tensor:
        return rows.to(dtype)

    assert isinstance(model.tok_embeddings, nn.Embedding)
    model.tok_embeddings.register_forward_hook(cast_rows)
