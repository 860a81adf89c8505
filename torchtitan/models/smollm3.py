"""SmolLM3: its sizes, and where it differs from Llama: every fourth layer has no positions.

The layout follows arXiv:2501.18795.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import Size

LARGE = DecoderConfig(
    dim=2048,
    num_layers=36,
    num_heads=16,
    num_kv_heads=4,
    hidden_dim=11_008,
    vocab_size=128_256,
    norm_eps=1e-6,
    rope_theta=5_000_000.0,
    layer_pattern="GGGN",
    tie_embeddings=True,
)
FLAVORS = {**llama3.small_flavors(LARGE, layer_pattern="GN"), "3B": LARGE}

HF = replace(
    llama3.HF,
    architecture="SmolLM3ForCausalLM",
    model_type="smollm3",
    fixed={**llama3.HF.fixed, "use_sliding_window": False},
    each_layer={"layer_types": "full_attention"},
    sizes={
        "rope_theta": Size("rope_theta", float, default=2_000_000.0),
        **llama3.SIZES,
        "tie_word_embeddings": Size("tie_embeddings", bool, default=True),
        "no_rope_layers": Size(
            "layer_pattern",
            str,
            default="GGGN",
            layer_types={"G": 1, "N": 0},
            interval="no_rope_layer_interval",
        ),
    },
)

SPEC = replace(llama3.SPEC, name="smollm3", flavors=FLAVORS, hf=HF)
