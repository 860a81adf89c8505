"""DeepSeek-V2-Lite: DeepSeek-V3's modules and names, and the earlier router (arXiv:2405.04434).

The router takes a softmax over all experts, without groups, bias or normalization of the weights.
It is a family of its own because Hugging Face's files differ from V3's. The large V2, which chooses
groups by their best expert, is not supported. `tiny` and `tiny8` are for tests.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import deepseek_v3
from torchtitan.models.spec import HFFormat, Size

_TINY = replace(
    deepseek_v3.TINY,
    q_lora_rank=None,
    num_shared_experts=2,
    num_expert_groups=None,
    num_limited_groups=None,
    norm_expert_weights=False,
    expert_bias=False,
    expert_score="softmax",
    expert_weight_scale=1.0,
)
FLAVORS = {
    "tiny": _TINY,
    "tiny8": replace(_TINY, num_layers=8, num_heads=8, num_kv_heads=8, vocab_size=264),
    "16B": deepseek_v3.LITE,
}

_V3 = deepseek_v3.HF
_OTHERS = ("n_group", "topk_group", "norm_topk_prob")
HF = HFFormat(
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    names={ours: theirs for ours, theirs in _V3.names.items() if ours != deepseek_v3.BIAS},
    rotary=frozenset(),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "n_group": 1,
        "topk_group": 1,
    },
    sizes={
        **{key: size for key, size in _V3.sizes.items() if key not in _OTHERS},
        "n_routed_experts": Size("num_experts", default=64),
        # V2-Lite's; transformers has none
        "num_experts_per_tok": Size("num_experts_per_token", default=6),
        "moe_intermediate_size": Size("expert_hidden_dim", default=1407),
        "first_k_dense_replace": Size("num_dense_layers", default=0, none_as=0),
        "n_shared_experts": Size("num_shared_experts", default=2, none_as=0),
        "routed_scaling_factor": Size("expert_weight_scale", float, default=1.0),
    },
    implied={"norm_expert_weights": False},
)

SPEC = replace(deepseek_v3.SPEC, name="deepseek_v2", flavors=FLAVORS, hf=HF)
