"""Low-rank adaptation (LoRA, arXiv:2106.09685): two small matrices beside a large frozen one.

It trains y = W x + (alpha / rank) B A x. W is frozen; A, rank x in, starts at random and B, out x
rank, starts at zero. So step 0 is the unchanged model bit for bit, only the adapter needs gradients
and optimizer state, and in the end W + (alpha / rank) B A can replace W.

The layer replaces the linear layer before anything is made parallel, and its weight keeps its name:
checkpoints of the model without adapters are read by the same names.

Shapes: I in, O out, R rank.

From the [lora] section to a function that gives a model its adapters.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan.base.errors import ConfigError
from torchtitan.base.patterns import check_pattern, matches
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.models.init import Constant, Init, Normal
from torchtitan.models.interface import CastsWeights, LanguageModel
from torchtitan.models.spec import TensorRole
from torchtitan.parallel.layout import Adapt
from torchtitan.parallel.tensor import HasParallelStyle, adapter_style, low_rank

logger = logging.getLogger(__name__)
DOWN, UP = "lora_a", "lora_b"
ADAPTERS = (f"*.{DOWN}", f"*.{UP}")
"""Shell patterns of the parameters of adapters."""


class LoRALinear(nn.Linear, CastsWeights, HasParallelStyle):
    """A linear layer and its adapter; it computes in the type of its input.

    `low_rank` may be replaced by a function that knows how the adapter lies over ranks.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        like = linear.weight
        super().__init__(
            linear.in_features, linear.out_features, bias=False, device="meta", dtype=like.dtype
        )
        self.weight, self.bias = like, linear.bias
        self.scale = scale
        self.lora_a = nn.Parameter(like.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(like.new_zeros(linear.out_features, rank))
        self.low_rank: Callable[[Tensor, Tensor, Tensor], Tensor] = low_rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's product plus the scaled one of the adapter."""
        a_RI, b_OR = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        return F.linear(x, self.weight.to(x.dtype), bias) + self.scale * self.low_rank(
            x, a_RI, b_OR
        )

    def parallel_style(self, role: TensorRole, *, stream: Placement) -> ParallelStyle:
        """Split the adapter along with the matrix beside it."""
        return adapter_style(role, stream=stream)


def is_adapter(name: str) -> bool:
    """Tell whether a parameter's name is that of an adapter."""
    return name.endswith((f".{DOWN}", f".{UP}"))


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of the layers that can have an adapter: exactly `nn.Linear`."""
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def apply_lora(model: LanguageModel, *, rank: int, alpha: float, patterns: Sequence[str]) -> None:
    """Give the linear layers that a shell pattern matches an adapter, in place.

    A of a layer starts with the variance of the usual uniform distribution, 1 / (3 I).
    """
    for name in linear_names(model):
        if matches(name, patterns):
            place, _, last = name.rpartition(".")
            linear = model.get_submodule(name)
            assert isinstance(linear, nn.Linear)
            adapted = LoRALinear(linear, rank=rank, scale=alpha / rank)
            setattr(model.get_submodule(place), last, adapted)
    initial_of_others = model.initial

    def initial(name: str) -> Init:
        if not is_adapter(name):
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


def build_adapt(settings: LoRAConfig, *, model: LanguageModel) -> Adapt:
    """Return what gives a model like `model` its adapters, in place.

    Raises:
        ConfigError: A pattern matches no layer.
    """
    linears = linear_names(model)
    key = "lora.modules"
    # those of the default may match nothing: experts are no linear layers
    is_default = settings.modules == LoRAConfig().modules
    if not is_default or not any(matches(name, settings.modules) for name in linears):
        for pattern in settings.modules:
            check_pattern(pattern, linears, key=key, what="linear layer")
    if not settings.modules:
        raise ConfigError.at(key, 'must name a layer, got none; try "layers.*"')
    return partial(apply_lora, rank=settings.rank, alpha=settings.alpha, patterns=settings.modules)


def warn_of_random_base(settings: LoRAConfig) -> None:
    """Warn that adapters are trained beside weights that are random, in a run from scratch."""
    if settings.rank:
        logger.warning(
            "lora.rank = %d trains adapters beside weights that are random and stay so, since the "
            "run starts from no checkpoint; name the base by checkpoint.initial_load_path (with "
            "checkpoint.enable = true)",
            settings.rank,
        )
