"""GPT-OSS: attention sinks, windows in every second layer, and experts with biases
(arXiv:2508.10925).

The wavelengths of all layers are YaRN's, whose ramp starts and ends between pairs.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import gemma3, llama3, mixtral, qwen2
from torchtitan.models.sizes import MoEConfig, RopeScaling
from torchtitan.models.spec import Size

SMALL = MoEConfig(
    dim=2880,
    num_layers=24,
    num_heads=64,
    num_kv_heads=8,
    head_dim=64,
    hidden_dim=2880,
    vocab_size=201_088,
    rope_theta=150_000.0,
    rope_scaling=RopeScaling(type="yarn", factor=32.0, original_max_position=4096, truncate=False),
    window=128,
    layer_pattern="LG",
    qkv_bias=True,
    wo_bias=True,
    has_sinks=True,
    num_experts=32,
    num_experts_per_token=4,
    expert_biases=True,
)
FLAVORS = {
    **llama3.small_flavors(SMALL, head_dim=16, window=7, num_experts=8, num_experts_per_token=3),
    "20B": SMALL,
    "120B": replace(SMALL, num_layers=36, num_experts=128),
}

ATTENTION, MLP = "model.layers.*.self_attn", "model.layers.*.mlp"
GATE_UP, DOWN = f"{MLP}.experts.gate_up_proj", f"{MLP}.experts.down_proj"
EXPERTS = {
    "layers.*.moe.router.gate.weight": f"{MLP}.router.weight",
    "layers.*.moe.router.gate.bias": f"{MLP}.router.bias",
    "layers.*.moe.experts.w1": GATE_UP,
    "layers.*.moe.experts.w3": GATE_UP,
    "layers.*.moe.experts.w2": DOWN,
    "layers.*.moe.experts.b1": f"{GATE_UP}_bias",
    "layers.*.moe.experts.b3": f"{GATE_UP}_bias",
    "layers.*.moe.experts.b2": f"{DOWN}_bias",
}
HF = replace(
    mixtral.HF,
    architecture="GptOssForCausalLM",
    model_type="gpt_oss",
    names={
        **mixtral.HF.names,
        **qwen2.BIASES,
        "layers.*.attention.wo.bias": f"{ATTENTION}.o_proj.bias",
        "layers.*.attention.sinks.weight": f"{ATTENTION}.sinks",
        **EXPERTS,
    },
    rotary=qwen2.HF.rotary,
    alternating=frozenset({GATE_UP, DOWN, f"{GATE_UP}_bias", f"{DOWN}_bias"}),
    fixed={
        "hidden_act": "silu",
        "attention_bias": True,
        "swiglu_limit": 7.0,
        "swiglu_alpha": 1.702,
    },
    sizes={
        **mixtral.HF.sizes,
        "rope_theta": Size("rope_theta", float, default=150_000.0),
        "head_dim": Size("head_dim", default=64),
        "sliding_window": Size("window", default=128),
        "layer_types": Size("layer_pattern", str, default="LG", layer_types=gemma3.LAYER_TYPES),
        "num_local_experts": Size("num_experts", default=128),
        "num_experts_per_tok": Size("num_experts_per_token", default=4),
    },
)

SPEC = replace(
    mixtral.SPEC,
    name="gpt_oss",
    flavors=FLAVORS,
    tensor_plan={**mixtral.SPEC.tensor_plan, "layers.*.attention.sinks": "sinks"},
    hf=HF,
)
