"""The models that a job can name, and what the rest of the library needs of them."""

from __future__ import annotations

from torchtitan.models import llama3, qwen3
from torchtitan.models.contract import Counts, LanguageModel, count
from torchtitan.models.init import initialize
from torchtitan.models.spec import DecoderConfig, ModelSpec

MODELS: dict[str, ModelSpec] = {spec.name: spec for spec in (llama3.SPEC, qwen3.SPEC)}

__all__ = [
    "MODELS",
    "Counts",
    "DecoderConfig",
    "LanguageModel",
    "ModelSpec",
    "count",
    "initialize",
]
