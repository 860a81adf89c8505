"""GLM-4.5: DeepSeek-V3's router, and grouped queries whose heads are partly rotated.

The projections to queries, keys and values have a bias (arXiv:2508.06471). The layer that predicts
further tokens is not part of a flavor. `tiny`, `tiny8` and `debugmodel` are for tests.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import deepseek_v3, llama3, qwen2, qwen3_moe
from torchtitan.models.sizes import GLMConfig
from torchtitan.models.spec import Size

AIR = GLMConfig(
    dim=4096,
    num_layers=46,
    num_heads=96,
    num_kv_heads=8,
    head_dim=128,
    hidden_dim=10_944,
    vocab_size=151_552,
    rope_theta=1_000_000.0,
    partial_rotary_factor=0.5,
    qkv_bias=True,
    num_experts=128,
    num_experts_per_token=8,
    expert_hidden_dim=1408,
    num_dense_layers=1,
    num_shared_experts=1,
    expert_bias=True,
    expert_score="sigmoid",
)
WIDE = replace(AIR, dim=5120, hidden_dim=12_288, num_experts=160, expert_hidden_dim=1536)
LARGE = replace(WIDE, num_layers=92, num_dense_layers=3, expert_weight_scale=2.5, qk_norm=True)
SMALL = {"head_dim": 16, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_token": 3}
FLAVORS = {
    **llama3.small_flavors(LARGE, expert_hidden_dim=24, **SMALL),
    "106B-A12B": AIR,
    "355B-A32B": LARGE,
}

SIZES = {
    **{key: size for key, size in deepseek_v3.HF.sizes.items() if size.field in vars(AIR)},
    "partial_rotary_factor": Size("partial_rotary_factor", float, none_as=1),
    "use_qk_norm": Size("qk_norm", bool),
}
HF = replace(
    deepseek_v3.HF,
    architecture="Glm4MoeForCausalLM",
    model_type="glm4_moe",
    names={
        **{ours: theirs for ours, theirs in deepseek_v3.NAMES.items() if ".moe." in ours},
        **qwen3_moe.HF.names,
        **qwen2.BIASES,
    },
    rotary=qwen3_moe.HF.rotary | qwen2.HF.rotary,
    fixed={"hidden_act": "silu", "attention_bias": True},
    required=frozenset({"attention_bias"}),
    sizes={
        **{key: replace(size, default=vars(AIR)[size.field]) for key, size in SIZES.items()},
        "head_dim": llama3.SIZES["head_dim"],
    },
)
"""The defaults of transformers are the sizes of GLM-4.5-Air."""

SPEC = replace(
    deepseek_v3.SPEC,
    name="glm4_moe",
    flavors=FLAVORS,
    hf=HF,
    build=qwen3_moe.Qwen3MoE,
    tensor_plan=qwen3_moe.TENSOR_PLAN,
)
