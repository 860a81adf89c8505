"""Low-rank adaptation (LoRA, arXiv:2106.09685): trains two small matrices per frozen matrix.

A layer computes y = W x + (alpha / rank) B A x. W is frozen; A, rank x in, starts at random and B,
out x rank, starts at zero. So step 0 is the unchanged model bit for bit, only the adapter needs
gradients and optimizer state, and W + (alpha / rank) B A can replace W after training.

`LoRALinear` replaces a linear layer before the model is parallelized. The weight keeps its name, so
checkpoints of the model without adapters load under the same names.

Shapes: I in, O out, R rank.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import Placement
from torch.distributed.tensor.parallel import ParallelStyle

from torchtitan.base.errors import ConfigError
from torchtitan.base.patterns import check_pattern, matches
from torchtitan.data.loader import MapSamples
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.models.init import Constant, Init, Normal, local_offsets, local_part
from torchtitan.models.interface import TIED, CastsWeights, HasParameters, LanguageModel
from torchtitan.models.spec import TensorRole
from torchtitan.parallel.tensor import HasParallelStyle, adapter_style, low_rank

DOWN, UP = "lora_a", "lora_b"
ADAPTERS = (f"*.{DOWN}", f"*.{UP}")
"""Shell patterns of the parameters of adapters."""


class LoRALinear(nn.Linear, CastsWeights, HasParallelStyle):
    """A linear layer with an adapter. It computes in the type of its input.

    Tensor parallelism replaces `low_rank` to multiply sharded adapters.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, scale: float) -> None:
        weight_OI = linear.weight
        super().__init__(
            linear.in_features, linear.out_features, False, device="meta", dtype=weight_OI.dtype
        )
        self.weight, self.bias = weight_OI, linear.bias
        self.scale = scale
        self.lora_a = nn.Parameter(weight_OI.new_empty(rank, linear.in_features))
        self.lora_b = nn.Parameter(weight_OI.new_zeros(linear.out_features, rank))
        self.low_rank: Callable[[Tensor, Tensor, Tensor], Tensor] = low_rank

    def forward(self, x: Tensor) -> Tensor:
        """Return the layer's product plus the scaled product of the adapter."""
        a_RI, b_OR = self.lora_a.to(x.dtype), self.lora_b.to(x.dtype)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        y = F.linear(x, self.weight.to(x.dtype), bias)
        return y + self.scale * self.low_rank(x, a_RI, b_OR)

    def parallel_style(self, role: TensorRole, *, stream: Placement) -> ParallelStyle:
        """Shard the adapter along with its matrix."""
        return adapter_style(role, stream=stream)


ALL_LINEAR = "all-linear"
NUMBER = re.compile(r"\.[0-9]+\.")
NUM_LOOKED_AT = 64
"""Samples in which special tokens are looked for."""


def is_adapter(name: str) -> bool:
    """Return whether a parameter is part of an adapter."""
    return name.endswith((f".{DOWN}", f".{UP}"))


def adapted_weight(name: str) -> str:
    """Return the weight whose row order a parameter has: B has the order of its matrix."""
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last == UP else name


def linear_names(model: nn.Module) -> list[str]:
    """Return the names of the layers that can have an adapter: exactly `nn.Linear`."""
    return [name for name, module in model.named_modules() if type(module) is nn.Linear]


def find_adapted(
    settings: LoRAConfig, *, model: LanguageModel, names: Mapping[str, str]
) -> list[str]:
    """Return the names of the linear layers of a model that `settings` select.

    `names` are Hugging Face's by the name of a parameter, with `*` in place of a layer's number.
    Raises ConfigError if a pattern matches no layer.
    """
    linears = linear_names(model)
    theirs = {
        linear: names.get(NUMBER.sub(".*.", f"{linear}.weight"), "").removesuffix(".weight")
        for linear in linears
    }

    def selects(pattern: str, linear: str) -> bool:
        is_named = matches(linear, [pattern]) or f".{theirs[linear]}".endswith(f".{pattern}")
        return is_named or pattern == ALL_LINEAR

    chosen = [linear for linear in linears if any(selects(p, linear) for p in settings.modules)]
    # a default pattern may match nothing: experts are not linear layers
    if not chosen or settings.modules != LoRAConfig().modules:
        for pattern in settings.modules:
            if not any(selects(pattern, linear) for linear in linears):
                check_pattern(pattern, linears, key="lora.modules", noun="linear layer")
    if not settings.modules:
        raise ConfigError.at("lora.modules", 'must name a layer, e.g. "layers.*"')
    return chosen


def apply_lora(model: LanguageModel, *, settings: LoRAConfig, names: Mapping[str, str]) -> None:
    """Add adapters to the linear layers of `find_adapted`, in place.

    A starts with the variance of PyTorch's default for linear layers, 1 / (3 I).
    """
    for name in find_adapted(settings, model=model, names=names):
        parent, _, last = name.rpartition(".")
        linear = model.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        adapted = LoRALinear(linear, rank=settings.rank, scale=settings.scale)
        setattr(model.get_submodule(parent), last, adapted)
    initial_of_model = model.initial

    def initial(name: str) -> Init:
        if not is_adapter(name):
            return initial_of_model(name)
        if name.endswith(UP):
            return Constant(0.0)
        adapted = model.get_submodule(name.rpartition(".")[0])
        assert isinstance(adapted, LoRALinear)
        return Normal(std=(3 * adapted.in_features) ** -0.5)

    model.initial = initial  # type: ignore[method-assign]


def merged(weight_OI: Tensor, a_RI: Tensor, b_OR: Tensor, *, scale: float) -> Tensor:
    """Return W + scale B A in float64, so that it is rounded once, when it is stored."""
    product_OI = torch.mm(b_OR.double(), a_RI.double())
    return weight_OI.double() + scale * product_OI


def check_special_rows(
    model: HasParameters, *, samples: MapSamples, special_tokens: Mapping[str, int]
) -> None:
    """Refuse special tokens of the data whose rows of the embedding are zeros: a base pads its
    vocabulary with such rows, and adapters do not train them. Collective."""
    first = [samples[k] for k in range(min(NUM_LOOKED_AT, samples.num_samples or 1))]
    labels = [s["labels"] if s["labels"].ndim == 1 else s["labels"][:, 0] for s in first]
    parts = [*(s["tokens"][: s["length"]] for s in first), *labels]
    ids = set(torch.cat(parts).tolist())
    has_number = torch.zeros(max(special_tokens.values(), default=0) + 1, dtype=torch.int64)
    for name, parameter in model.named_parameters():
        if name == TIED:
            local, rows = local_part(parameter), local_offsets(parameter)[0] // parameter.shape[1]
            filled = rows[local.detach().any(1).cpu()] if local.numel() else rows[:0]
            has_number[filled[filled < len(has_number)]] = 1
    dist.all_reduce(has_number, dist.ReduceOp.MAX)
    untrained = [name for name, i in special_tokens.items() if i in ids and not has_number[i]]
    if untrained:
        raise ConfigError.at(
            "lora.train_embeddings",
            f"must be true for tokens whose rows of the base are zeros, got {untrained[0]!r}",
        )
