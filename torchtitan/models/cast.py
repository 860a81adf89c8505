"""The type of a model's parameters, of which what is no weight keeps its own."""

from __future__ import annotations

from typing import TypeVar

import torch

from torchtitan.models.contract import LanguageModel
from torchtitan.models.routing import untrained

M = TypeVar("M", bound=LanguageModel)


def cast(model: M, dtype: torch.dtype) -> M:
    """Give the weights of a model another type, in place, and return it.

    What balances experts stays float32: rounded to 16 bits it would choose others.
    """
    kept = [(bias, bias.detach()) for bias in untrained(model)]
    model.to(dtype)
    for bias, wide in kept:
        bias.data = wide
    return model
