"""The models that a job can name."""

from __future__ import annotations

from torchtitan.models import llama3, mistral, qwen2, qwen3, qwen3_moe
from torchtitan.models.spec import ModelSpec

MODELS: dict[str, ModelSpec] = {
    spec.name: spec for spec in (llama3.SPEC, qwen2.SPEC, qwen3.SPEC, qwen3_moe.SPEC, mistral.SPEC)
}
