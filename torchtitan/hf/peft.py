"""LoRA adapters in an export: merged into the weights, or separate in PEFT's format.

PEFT stores an adapter as one safetensors file and a small JSON file. B has the rows of its weight,
so its row order follows the weight.

Embedding and output head that were trained in full are stored in full, as PEFT's `modules_to_save`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torchtitan.finetune.lora import DOWN, UP, merged
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.hf.names import Names

_PREFIX = "base_model.model."
_ENDINGS = {DOWN: "lora_A.weight", UP: "lora_B.weight"}


@dataclass(frozen=True, kw_only=True)
class AdapterExport:
    """The adapter of a run, and how it is exported."""

    settings: LoRAConfig
    merge: bool
    """Whether it is merged into the weights. False: only the adapter is exported."""
    has_embeddings: bool = False
    """Whether embedding and output head were trained too."""
    base: str | None = None
    """Path of the base weights."""

    @classmethod
    def from_settings(cls, settings: LoRAConfig, *, base: str | None) -> AdapterExport | None:
        """Return the adapter of a job, None if it has none."""
        if not settings.rank:
            return None
        merge = settings.export_format == "merged"
        return cls(
            settings=settings,
            merge=merge,
            has_embeddings=settings.train_embeddings and not merge,
            base=base,
        )

    def factors_of(self, weight: str) -> Sequence[str]:
        """Return the names of A and B of a weight; a bias has none."""
        module, _, last = weight.rpartition(".")
        return (f"{module}.{DOWN}", f"{module}.{UP}") if last == "weight" else ()

    def merge_into(self, weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
        """Return a weight plus the scaled product of A and B, in float64."""
        return merged(weight, a, b, scale=self.settings.scale)

    def to_hf(self, name: str, *, names: Names) -> str:
        """Return PEFT's name of A or B, or of a parameter that is stored in full."""
        module, _, last = name.rpartition(".")
        if last not in _ENDINGS:
            return f"{_PREFIX}{names.to_hf(name)}"
        return f"{_PREFIX}{names.to_hf(f'{module}.weight').removesuffix('weight')}{_ENDINGS[last]}"

    def config(self, names: Sequence[str], *, num_layers: int) -> dict[str, Any]:
        """Return PEFT's adapter_config.json for an adapter of these tensors.

        Modules that every layer adapts are listed by their last name only.
        """
        ending = f".{_ENDINGS[DOWN]}"
        modules = [
            n.removeprefix(_PREFIX).removesuffix(ending) for n in names if n.endswith(ending)
        ]
        counts = Counter(module.rpartition(".")[2] for module in modules)
        in_all_layers = {name for name, count in counts.items() if count == num_layers}
        alpha = self.settings.alpha
        single = [module for module in modules if module.rpartition(".")[2] not in in_all_layers]
        return {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base,
            "r": self.settings.rank,
            "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
            "use_rslora": self.settings.rank_stabilized,
            "lora_dropout": 0.0,
            "bias": "none",
            "fan_in_fan_out": False,
            "inference_mode": True,
            "target_modules": [*sorted(in_all_layers), *single],
            "modules_to_save": sorted(
                n.removesuffix(".weight").rpartition(".")[2]
                for n in names
                if not n.endswith(tuple(_ENDINGS.values()))
            )
            or None,
        }
