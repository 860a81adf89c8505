"""Gemma 3's text models: their sizes, and where they differ from Llama (arXiv:2503.19786).

Of six layers five attend to a window, with wavelengths of their own. Attention and feed-forward
have a norm on either side, norms multiply by 1 + weight, the feed-forward is GeGLU, and embedded
tokens are multiplied by sqrt(dim). The larger published models contain a vision tower, whose
folders are refused.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3, olmo2, qwen3
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.models.spec import HFFormat, Size, TensorRole

TEXT = DecoderConfig(
    dim=1152,
    num_layers=26,
    num_heads=4,
    num_kv_heads=1,
    head_dim=256,
    hidden_dim=6912,
    vocab_size=262_144,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    local_rope_theta=10_000.0,
    window=512,
    layer_pattern="LLLLLG",
    attention_scale=256**-0.5,
    tie_embeddings=True,
    qk_norm=True,
    scales_embedding=True,
    norm_placement="both",
    norm_offset=True,
    activation="gelu",
)
LARGE = replace(
    TEXT, vocab_size=262_208, window=1024, rope_scaling=RopeScaling(type="linear", factor=8.0)
)
WIDE = replace(LARGE, head_dim=128, attention_scale=168**-0.5)
FLAVORS = {
    **llama3.small_flavors(TEXT, head_dim=None, attention_scale=0.25, window=7, layer_pattern="LG"),
    "270M": replace(TEXT, dim=640, num_layers=18, hidden_dim=2048),
    "1B": TEXT,
    "4B": replace(LARGE, dim=2560, num_layers=34, num_heads=8, num_kv_heads=4, hidden_dim=10_240),
    "12B": replace(LARGE, dim=3840, num_layers=48, num_heads=16, num_kv_heads=8, hidden_dim=15_360),
    "27B": replace(WIDE, dim=5376, num_layers=62, num_heads=32, num_kv_heads=16, hidden_dim=21_504),
}

TENSOR_PLAN: dict[str, TensorRole] = {
    **qwen3.TENSOR_PLAN,
    "layers.*.post_attention_norm": "norm",
    "layers.*.post_ffn_norm": "norm",
}
NORMS = {
    **olmo2.POST_NORMS,
    "layers.*.ffn_norm.weight": "model.layers.*.pre_feedforward_layernorm.weight",
}
LAYER_TYPES = {"L": "sliding_attention", "G": "full_attention"}
HF = HFFormat(
    architecture="Gemma3ForCausalLM",
    model_type="gemma3_text",
    names={**qwen3.HF.names, **NORMS},
    rotary=qwen3.HF.rotary,
    fixed={
        "hidden_activation": "gelu_pytorch_tanh",
        "attention_bias": False,
        "final_logit_softcapping": None,
        "attn_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    sizes={
        "rope_theta": Size("rope_theta", float, default=1_000_000.0),
        **llama3.SIZES,
        "tie_word_embeddings": Size("tie_embeddings", bool, default=True),
        "sliding_window": Size("window", default=4096),
        "layer_types": Size(
            "layer_pattern",
            str,
            default="LLLLLG",
            layer_types=LAYER_TYPES,
            interval="sliding_window_pattern",
        ),
        "query_pre_attn_scalar": Size("attention_scale", float, default=256.0, power=-0.5),
        "rope_local_base_freq": Size("local_rope_theta", float, default=10_000.0),
    },
)

SPEC = replace(llama3.SPEC, name="gemma3", flavors=FLAVORS, tensor_plan=TENSOR_PLAN, hf=HF)
