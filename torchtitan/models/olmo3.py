"""OLMo 3: its sizes, and where it differs from OLMo 2 (arXiv:2512.13961).

Of four layers three attend to a window; only the wavelengths of the fourth are scaled.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import gemma3, llama3, olmo2
from torchtitan.models.sizes import RopeScaling
from torchtitan.models.spec import NESTED_THETA, Size

LARGE = replace(
    olmo2.LARGE,
    vocab_size=100_278,
    window=4096,
    layer_pattern="LLLG",
    local_rope_theta=500_000.0,
    rope_scaling=RopeScaling(
        type="yarn", factor=8.0, original_max_position=8192, attention_factor=1.2079441541679836
    ),
)
FLAVORS = {
    **llama3.small_flavors(
        LARGE,
        window=7,
        layer_pattern="LG",
        rope_scaling=RopeScaling(type="yarn", factor=8.0, original_max_position=16),
    ),
    "7B": LARGE,
    "32B": replace(LARGE, dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, hidden_dim=27_648),
}

HF = replace(
    olmo2.HF,
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    sizes={
        "rope_theta": Size("rope_theta", float, default=500_000.0),
        **olmo2.HF.sizes,
        "sliding_window": Size("window", default=4096),
        "layer_types": Size("layer_pattern", str, default="LLLG", layer_types=gemma3.LAYER_TYPES),
        NESTED_THETA: Size("local_rope_theta", float, default=500_000.0),
    },
)

SPEC = replace(olmo2.SPEC, name="olmo3", flavors=FLAVORS, hf=HF)
