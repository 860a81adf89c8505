"""OLMo 2: its sizes, and where it differs from Llama (arXiv:2501.00656).

Attention and feed-forward have a norm after them and none before. The queries of all heads are
normalized as one vector, keys too.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3, qwen3
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import HFFormat, Size, TensorRole

LARGE = DecoderConfig(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=11_008,
    vocab_size=100_352,
    norm_eps=1e-6,
    norm_placement="post",
    joint_qk_norm=True,
)

FLAVORS = {
    **llama3.small_flavors(LARGE),
    "1B": replace(LARGE, dim=2048, num_layers=16, num_heads=16, num_kv_heads=16, hidden_dim=8192),
    "7B": LARGE,
    "13B": replace(
        LARGE, dim=5120, num_layers=40, num_heads=40, num_kv_heads=40, hidden_dim=13_824
    ),
    "32B": replace(LARGE, dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, hidden_dim=27_648),
}

PRE_NORMS = ("layers.*.attention_norm", "layers.*.ffn_norm")
TENSOR_PLAN: dict[str, TensorRole] = {
    **{name: role for name, role in llama3.TENSOR_PLAN.items() if name not in PRE_NORMS},
    "layers.*.post_attention_norm": "norm",
    "layers.*.post_ffn_norm": "norm",
    "layers.*.attention.q_norm": "joint_norm",
    "layers.*.attention.k_norm": "joint_norm",
}
POST_NORMS = {
    "layers.*.post_attention_norm.weight": "model.layers.*.post_attention_layernorm.weight",
    "layers.*.post_ffn_norm.weight": "model.layers.*.post_feedforward_layernorm.weight",
}
NAMES = {**llama3.HF.names, **qwen3.HEAD_NORMS, **POST_NORMS}
HF = HFFormat(
    architecture="Olmo2ForCausalLM",
    model_type="olmo2",
    names={name: theirs for name, theirs in NAMES.items() if name[:-7] not in PRE_NORMS},
    rotary=qwen3.HF.rotary,
    fixed={"hidden_act": "silu", "attention_bias": False},
    sizes={**llama3.SIZES, "rms_norm_eps": Size("norm_eps", float, default=1e-5)},
)

SPEC = replace(llama3.SPEC, name="olmo2", flavors=FLAVORS, tensor_plan=TENSOR_PLAN, hf=HF)
