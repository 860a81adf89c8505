"""Granite 3, dense: its sizes, and where it differs from Llama: four factors.

The factors come from maximal update parametrization (arXiv:2203.03466), the sizes from Granite 3.3.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import Size

SMALL = DecoderConfig(
    dim=2048,
    num_layers=40,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=8192,
    vocab_size=49_159,
    rope_theta=10_000_000.0,
    embedding_scale=12.0,
    residual_scale=0.22,
    attention_scale=1 / 64,
    logits_divisor=8.0,
    tie_embeddings=True,
)

FLAVORS = {
    **llama3.small_flavors(SMALL, attention_scale=0.2, tie_embeddings=False),
    "2B": SMALL,
    "8B": replace(SMALL, dim=4096, hidden_dim=12_800, attention_scale=1 / 128, logits_divisor=16.0),
}

HF = replace(
    llama3.HF,
    architecture="GraniteForCausalLM",
    model_type="granite",
    sizes={
        **llama3.SIZES,
        "embedding_multiplier": Size("embedding_scale", float, default=1.0, none_as=1),
        "residual_multiplier": Size("residual_scale", float, default=1.0, none_as=1),
        "attention_multiplier": Size("attention_scale", float, default=1.0),
        "logits_scaling": Size("logits_divisor", float, default=1.0, none_as=1),
    },
)

SPEC = replace(llama3.SPEC, name="granite", flavors=FLAVORS, hf=HF)
