"""Low-rank factors in the files of Hugging Face: added to the weights, or alone as PEFT reads them.

An adapter is one safetensors file of the factors and a few numbers beside it. B has the rows of its
weight, so where those lie in another order for Hugging Face, so do these.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torchtitan.checkpoint.hf import their_name
from torchtitan.models.lora import DOWN, UP, is_factor
from torchtitan.models.spec import HFFormat

ADAPTER_WEIGHTS = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ENDINGS = {DOWN: "lora_A.weight", UP: "lora_B.weight"}


@dataclass(frozen=True, kw_only=True)
class Factors:
    """What becomes of the factors of a model."""

    rank: int
    alpha: float
    alone: bool
    """Whether they are all that is written; else they are added to the weights."""
    base: str | None = None
    """Where the weights come from that they belong to."""

    @property
    def scale(self) -> float:
        """By what their product is multiplied."""
        return self.alpha / self.rank


def factors_of(weight: str) -> tuple[str, str]:
    """Return the names of the factors that a weight would have, A first."""
    module = weight.rpartition(".")[0]
    return f"{module}.{DOWN}", f"{module}.{UP}"


def weight_beside(name: str) -> str | None:
    """Return the weight whose rows a tensor's rows are: its own name, or that beside B; None: A."""
    module, _, last = name.rpartition(".")
    if not is_factor(name):
        return name
    return f"{module}.weight" if last == UP else None


def factor_name(ours: str, *, names: HFFormat) -> str:
    """Return what PEFT calls a factor."""
    module, _, last = ours.rpartition(".")
    theirs = their_name(f"{module}.weight", names=names).removesuffix("weight")
    return f"{_PREFIX}{theirs}{_ENDINGS[last]}"


def adapter_config(factors: Factors, names: Sequence[str], *, num_layers: int) -> dict[str, Any]:
    """Return the adapter_config.json of factors of these names (PEFT's).

    A kind of layer is named by its last part where all layers of the model have it.
    """
    ending = f".{_ENDINGS[DOWN]}"
    modules = [n.removeprefix(_PREFIX).removesuffix(ending) for n in names if n.endswith(ending)]
    kinds = Counter(module.rpartition(".")[2] for module in modules)
    everywhere = {kind for kind, count in kinds.items() if count == num_layers}
    others = [module for module in modules if module.rpartition(".")[2] not in everywhere]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": factors.base,
        "r": factors.rank,
        "lora_alpha": factors.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "target_modules": [*sorted(everywhere), *others],
    }
