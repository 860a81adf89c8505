"""The built-in model families. A family's file is imported when the family is looked up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib import import_module

from torchtitan.models.spec import ModelSpec


class Families(Mapping[str, ModelSpec]):
    """Model families by name.

    Args:
        modules: The module of each family, whose `SPEC` describes it.
    """

    def __init__(self, modules: Mapping[str, str]) -> None:
        self._modules = modules

    def __getitem__(self, name: str) -> ModelSpec:
        spec: ModelSpec = import_module(self._modules[name]).SPEC
        return spec

    def __iter__(self) -> Iterator[str]:
        return iter(self._modules)

    def __len__(self) -> int:
        return len(self._modules)


MODELS = Families(
    {
        "llama3": "torchtitan.models.llama3",
        "qwen2": "torchtitan.models.qwen2",
        "qwen3": "torchtitan.models.qwen3",
        "qwen3_moe": "torchtitan.models.qwen3_moe",
        "deepseek_v3": "torchtitan.models.deepseek_v3",
        "deepseek_v2": "torchtitan.models.deepseek_v2",
        "mistral": "torchtitan.models.mistral",
    }
)
