"""OLMo 3: its sizes, and where it differs from OLMo 2 (arXiv:2512.13961).

Of four layers three attend to a window; only the wavelengths of the fourth are scaled.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3, olmo2
from torchtitan.models.sizes import RopeScaling
from torchtitan.models.spec import HFFormat, ModelSpec, Size

LARGE = replace(
    olmo2.LARGE,
    vocab_size=100_278,
    window=4096,
    layer_pattern="LLLG",
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

HF = HFFormat(
    architecture="Olmo3ForCausalLM",
    model_type="olmo3",
    names=olmo2.HF.names,
    rotary=olmo2.HF.rotary,
    fixed=olmo2.HF.fixed,
    sizes={
        "rope_theta": Size("rope_theta", float, default=500_000.0),
        **olmo2.HF.sizes,
        "sliding_window": Size("window", default=4096),
        "layer_types": Size(
            "layer_pattern",
            str,
            default="LLLG",
            kinds={"L": "sliding_attention", "G": "full_attention"},
        ),
        "rope_local_base_freq": Size("local_rope_theta", float, default="rope_theta"),
    },
)

SPEC = ModelSpec(
    name="olmo3",
    flavors=FLAVORS,
    build=llama3.Llama3,
    tensor_plan=olmo2.TENSOR_PLAN,
    stages=True,
    hf=HF,
)
