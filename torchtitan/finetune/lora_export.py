"""LoRA in Hugging Face folders: merged into the weights, or as an adapter in PEFT's format.

An adapter is one safetensors file of its matrices, and a small JSON file. B has the rows of its
weight, so where those change places for Hugging Face, so do B's.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchtitan.finetune.lora import DOWN, UP, is_adapter, merged
from torchtitan.finetune.settings import LoRAConfig

_PREFIX = "base_model.model."
_ENDINGS = {DOWN: "lora_A.weight", UP: "lora_B.weight"}


def weight_beside(name: str) -> str:
    """Return the weight whose rows a tensor's are: of B the one beside it, else it has its own."""
    module, _, last = name.rpartition(".")
    return f"{module}.weight" if last == UP else name


@dataclass(frozen=True, kw_only=True)
class LoRAExport:
    """How an export writes the adapter of a run; `hf.write.Adapter` says what each part is for."""

    rank: int
    alpha: float
    alone: bool
    base: str | None = None
    """Where the adapted weights come from."""

    @classmethod
    def of(cls, settings: LoRAConfig, *, base: str | None) -> LoRAExport | None:
        """Return how the adapter of a job is written; None: it has none."""
        if not settings.rank:
            return None
        alone = settings.export_format == "adapter"
        return cls(rank=settings.rank, alpha=settings.alpha, alone=alone, base=base)

    def owns(self, name: str) -> bool:
        """Tell whether a name is the adapter's."""
        return is_adapter(name)

    def parts_of(self, weight: str) -> Sequence[str]:
        """Return the names of A and B; a bias has none."""
        module, _, last = weight.rpartition(".")
        return (f"{module}.{DOWN}", f"{module}.{UP}") if last == "weight" else ()

    def merge(self, weight: Tensor, parts: Sequence[Tensor]) -> Tensor:
        """Return the weight with the scaled product added."""
        a, b = parts
        return merged(weight, a, b, scale=self.alpha / self.rank)

    def their_name(self, name: str, *, theirs: Callable[[str], str]) -> str:
        """Return what PEFT calls A or B."""
        module, _, last = name.rpartition(".")
        return f"{_PREFIX}{theirs(f'{module}.weight').removesuffix('weight')}{_ENDINGS[last]}"

    def config(self, names: Sequence[str], *, num_layers: int) -> dict[str, Any]:
        """Return PEFT's adapter_config.json.

        A kind of layer is named by its last part where all layers of the model have it.
        """
        ending = f".{_ENDINGS[DOWN]}"
        modules = [
            n.removeprefix(_PREFIX).removesuffix(ending) for n in names if n.endswith(ending)
        ]
        kinds = Counter(module.rpartition(".")[2] for module in modules)
        everywhere = {kind for kind, count in kinds.items() if count == num_layers}
        others = [module for module in modules if module.rpartition(".")[2] not in everywhere]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.rank,
            "lora_alpha": int(self.alpha) if self.alpha.is_integer() else self.alpha,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": [*sorted(everywhere), *others],
        }
