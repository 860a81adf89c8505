"""Low-rank adaptation: two small matrices beside a large one, which stays as it is.

LoRA (arXiv:2106.09685) trains y = W x + (alpha / rank) B A x: W is frozen, A is rank x in and
starts at random, B is out x rank and starts at zero. So step 0 is the model as it was, bit for bit,
gradients and optimizer state are needed of the factors alone, and in the end W + (alpha / rank) B A
can be written in the place of W.

The module is put in the place of the linear layer before anything is made parallel, and keeps the
name of its weight; checkpoints of the model without factors are read by the same names.

Shapes: I in, O out, R rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.models.contract import LanguageModel
from torchtitan.models.init import Constant, Init, Normal

DOWN, UP = "lora_a", "lora_b"


def low_rank(x: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """Return B A x."""
    return F.linear(F.linear(x, a_RI), b_OR)


class LoRALinear(nn.Linear):
    """A linear layer without bias, and its low-rank factors.

    `low_rank` may be replaced by something that knows how the factors lie over ranks.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        assert linear.bias is None, "no layer of a decoder has one"
        like = linear.weight
        super().__init__(
            linear.in_features, linear.out_features, bias=False, device="meta", dtype=like.dtype
        )
        self.weight = like
        self.scale = scale
        self.lora_a = nn.Parameter(like.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(like.new_zeros(linear.out_features, rank))
        self.low_rank: Callable[[Tensor, Tensor, Tensor], Tensor] = low_rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's product and, scaled, that of the factors."""
        return F.linear(x, self.weight) + self.scale * self.low_rank(x, self.lora_a, self.lora_b)


def is_factor(name: str) -> bool:
    """Tell whether a parameter's name is that of a low-rank factor."""
    return name.endswith((f".{DOWN}", f".{UP}"))


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of the layers that can have factors: linear ones, and nothing more."""
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def apply_lora(model: LanguageModel, *, rank: int, alpha: float, patterns: Sequence[str]) -> None:
    """Give the linear layers that a shell pattern matches their factors, in place.

    A of a layer starts with the variance of the usual uniform distribution, 1 / (3 I).
    """
    for name in linear_names(model):
        if any(fnmatchcase(name, pattern) for pattern in patterns):
            place, _, last = name.rpartition(".")
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            adapted = LoRALinear(linear, rank=rank, scale=alpha / rank)
            setattr(model.get_submodule(place), last, adapted)
    initial_of_others = model.initial

    def initial(name: str) -> Init:
        if not is_factor(name):
            return initial_of_others(name)
        if name.endswith(UP):
            return Constant(0.0)
        adapted = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(adapted, LoRALinear)
        return Normal(std=(3 * adapted.in_features) ** -0.5)

    model.initial = initial  # type: ignore[method-assign]


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, *, scale: float) -> Tensor:
    """Return W + scale B A, in float64: it is rounded once, when it is stored."""
    product_OI = torch.mm(b_OR.double(), a_RI.double())
    return weight_OI.double() + scale * product_OI
