"""DeepSeek-V3: latent attention, and experts chosen by groups (arXiv:2412.19437).

The router scores each expert independently (sigmoid). A token first chooses the best groups of
experts, then experts among them, by score plus a bias that balances the load. The weights, without
the bias, are divided by their sum and scaled. A shared expert gets every token, and the first
layers have no experts.

`671B` is the published model, without the layers that predict further tokens. `16B` is the model
of that name in torchtitan 0.2: the sizes of DeepSeek-V2-Lite (arXiv:2405.04434), whose router takes
a softmax, with V3's bias. Its files have the format of deepseek_v2. The `mscale` of V2-Lite is
0.707, which torchtitan rounds to 0.70 and ignores up to 4096 tokens. `tiny` and `tiny8` are for
tests.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3, qwen3_moe
from torchtitan.models.init import Init, Normal
from torchtitan.models.mla import LatentAttention
from torchtitan.models.sizes import DecoderConfig, MLAConfig, RopeScaling
from torchtitan.models.spec import HFFormat, ModelSpec, Size, TensorRole

YARN = RopeScaling(
    type="yarn", factor=40.0, original_max_position=4096, mscale=1.0, mscale_all_dim=1.0
)

LARGE = MLAConfig(
    dim=7168,
    num_layers=61,
    num_heads=128,
    num_kv_heads=128,
    hidden_dim=18_432,
    vocab_size=129_280,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=YARN,
    q_lora_rank=1536,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=256,
    num_experts_per_token=8,
    expert_hidden_dim=2048,
    num_dense_layers=3,
    num_shared_experts=1,
    num_expert_groups=8,
    num_limited_groups=4,
    expert_bias=True,
    expert_score="sigmoid",
    expert_weight_scale=2.5,
)
LITE = MLAConfig(
    dim=2048,
    num_layers=27,
    num_heads=16,
    num_kv_heads=16,
    hidden_dim=10_944,
    vocab_size=102_400,
    norm_eps=1e-6,
    rope_theta=10_000.0,
    rope_scaling=replace(YARN, mscale=0.707, mscale_all_dim=0.707),
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    num_experts=64,
    num_experts_per_token=6,
    expert_hidden_dim=1408,
    num_dense_layers=1,
    num_shared_experts=2,
    norm_expert_weights=False,
)
"""DeepSeek-V2-Lite."""

TINY = replace(
    LARGE,
    dim=32,
    num_layers=3,
    num_heads=4,
    num_kv_heads=4,
    hidden_dim=96,
    vocab_size=263,
    # a short pretraining context, so that short sequences have all kinds of wavelengths
    rope_scaling=RopeScaling(
        type="yarn",
        factor=8.0,
        original_max_position=64,
        beta_fast=4.0,
        mscale=0.8,
        mscale_all_dim=0.5,
    ),
    q_lora_rank=24,
    kv_lora_rank=16,
    qk_nope_head_dim=12,
    qk_rope_head_dim=8,
    v_head_dim=10,
    num_experts=8,
    num_experts_per_token=3,
    expert_hidden_dim=24,
    num_dense_layers=1,
    num_expert_groups=4,
    num_limited_groups=2,
)

FLAVORS = {
    "tiny": TINY,
    "tiny8": replace(TINY, num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=264),
    "debugmodel": replace(
        LARGE,
        dim=256,
        num_layers=6,
        num_heads=8,
        num_kv_heads=8,
        hidden_dim=768,
        vocab_size=2048,
        rope_scaling=None,
        q_lora_rank=192,
        kv_lora_rank=128,
        qk_nope_head_dim=32,
        qk_rope_head_dim=16,
        v_head_dim=32,
        num_experts=16,
        num_experts_per_token=3,
        expert_hidden_dim=192,
        num_dense_layers=1,
        num_expert_groups=4,
        num_limited_groups=2,
    ),
    "16B": replace(LITE, expert_bias=True),
    "671B": LARGE,
}

TENSOR_PLAN: dict[str, TensorRole] = {
    **{
        name: role
        for name, role in qwen3_moe.TENSOR_PLAN.items()
        if not name.startswith("layers.*.attention") or name == "layers.*.attention_norm"
    },
    "layers.*.attention.wq": "gathered_column",
    "layers.*.attention.wq_a": "copied",
    "layers.*.attention.q_norm": "norm",
    "layers.*.attention.wq_b": "gathered_column",
    "layers.*.attention.wkv_a": "copied",
    "layers.*.attention.kv_norm": "norm",
    "layers.*.attention.k_pe": "shared",
    "layers.*.attention.wkv_b": "gathered_column",
    "layers.*.attention.wo": "row",
}

_ATTENTION = {
    "wq": "q_proj",
    "wq_a": "q_a_proj",
    "q_norm": "q_a_layernorm",
    "wq_b": "q_b_proj",
    "wkv_a": "kv_a_proj_with_mqa",
    "kv_norm": "kv_a_layernorm",
    "wkv_b": "kv_b_proj",
    "wo": "o_proj",
}
BIAS = "layers.*.moe.expert_bias"
NAMES = {
    **{ours: theirs for ours, theirs in llama3.HF.names.items() if ".attention." not in ours},
    **{
        f"layers.*.attention.{ours}.weight": f"model.layers.*.self_attn.{theirs}.weight"
        for ours, theirs in _ATTENTION.items()
    },
    **{ours: theirs for ours, theirs in qwen3_moe.HF.names.items() if ".moe." in ours},
    **{
        f"layers.*.moe.shared_experts.{ours}.weight": (
            f"model.layers.*.mlp.shared_experts.{theirs}_proj.weight"
        )
        for ours, theirs in {"w1": "gate", "w3": "up", "w2": "down"}.items()
    },
    BIAS: "model.layers.*.mlp.gate.e_score_correction_bias",
}

HF = HFFormat(
    architecture="DeepseekV3ForCausalLM",
    model_type="deepseek_v3",
    names=NAMES,
    rotary=frozenset(),  # Hugging Face rotates neighbours too
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
        "rope_interleave": True,
    },
    sizes={
        **{key: size for key, size in llama3.SIZES.items() if key != "head_dim"},
        "q_lora_rank": Size("q_lora_rank", default=1536),
        "kv_lora_rank": Size("kv_lora_rank", default=512),
        "qk_nope_head_dim": Size("qk_nope_head_dim", default=128),
        "qk_rope_head_dim": Size("qk_rope_head_dim", default=64),
        "v_head_dim": Size("v_head_dim", default=128),
        "n_routed_experts": Size("num_experts", default=256),
        "num_experts_per_tok": Size("num_experts_per_token", default=8),
        "moe_intermediate_size": Size("expert_hidden_dim", default=2048),
        "first_k_dense_replace": Size("num_dense_layers", default=3, none_as=0),
        "n_shared_experts": Size("num_shared_experts", default=1, none_as=0),
        "n_group": Size("num_expert_groups", default=8, none_as=1),
        "topk_group": Size("num_limited_groups", default=4, none_as=1),
        "norm_topk_prob": Size("norm_expert_weights", bool, default=True),
        "routed_scaling_factor": Size("expert_weight_scale", float, default=2.5),
    },
    implied={"expert_score": "sigmoid", "expert_bias": True},
    float32=frozenset({BIAS}),
    more_layers="num_nextn_predict_layers",
)


class DeepSeekV3(qwen3_moe.Qwen3MoE):
    """The decoder with experts, latent attention and DeepSeek's initial weights."""

    def __init__(self, config: DecoderConfig) -> None:
        assert isinstance(config, MLAConfig)
        super().__init__(config)
        for block in self.layers.values():
            block.attention = LatentAttention(config)

    def initial(self, name: str) -> Init:
        """Return how a parameter is initialized: matrices of latents and heads like wq."""
        match name.split("."):
            case ["layers", _, "attention", "wq_a" | "wq_b" | "wkv_a" | "wkv_b", "weight"]:
                return Normal(std=0.02)
        return super().initial(name)


SPEC = ModelSpec(
    name="deepseek_v3",
    flavors=FLAVORS,
    build=DeepSeekV3,
    tensor_plan=TENSOR_PLAN,
    stages=True,
    hf=HF,
)
