"""The models that a job can name."""

from __future__ import annotations

from torchtitan.models import (
    deepseek_v2,
    deepseek_v3,
    llama3,
    mistral,
    qwen2,
    qwen3,
    qwen3_moe,
)
from torchtitan.models.spec import ModelSpec

_FAMILIES = (llama3, qwen2, qwen3, qwen3_moe, deepseek_v3, deepseek_v2, mistral)
MODELS: dict[str, ModelSpec] = {family.SPEC.name: family.SPEC for family in _FAMILIES}
