"""Qwen2 and Qwen2.5, dense: their sizes, and where they differ from Llama (arXiv:2412.15115).

The projections to queries, keys and values have a bias. The sizes are Qwen2.5's; Qwen2's models of
the same names have the same sizes. The norms of the larger base models have an epsilon of 1e-5, and
those of the Instruct models 1e-6, so each has two flavors. `tiny`, `tiny8` and `debugmodel` are for
tests; the latter two have tied embeddings, like the small models of Qwen.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import HFFormat

LARGE = DecoderConfig(
    dim=3584,
    num_layers=28,
    num_heads=28,
    num_kv_heads=4,
    hidden_dim=18_944,
    vocab_size=152_064,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    qkv_bias=True,
)
TIED = replace(LARGE, vocab_size=151_936, num_kv_heads=2, tie_embeddings=True)
"""Common to the sizes up to 3B."""
INSTRUCT = {
    "14B": replace(LARGE, dim=5120, num_layers=48, num_heads=40, num_kv_heads=8, hidden_dim=13_824),
    "32B": replace(LARGE, dim=5120, num_layers=64, num_heads=40, num_kv_heads=8, hidden_dim=27_648),
    "72B": replace(LARGE, dim=8192, num_layers=80, num_heads=64, num_kv_heads=8, hidden_dim=29_568),
}

FLAVORS = {
    "tiny": llama3.small_flavors(LARGE)["tiny"],
    "tiny8": llama3.small_flavors(TIED)["tiny8"],
    "debugmodel": replace(
        TIED, dim=256, num_layers=6, num_heads=16, num_kv_heads=4, hidden_dim=768, vocab_size=2048
    ),
    "0.5B": replace(TIED, dim=896, num_layers=24, num_heads=14, hidden_dim=4864),
    "1.5B": replace(TIED, dim=1536, num_layers=28, num_heads=12, hidden_dim=8960),
    "3B": replace(TIED, dim=2048, num_layers=36, num_heads=16, hidden_dim=11_008),
    "7B": LARGE,
    **{name: replace(config, norm_eps=1e-5) for name, config in INSTRUCT.items()},
    **{f"{name}-Instruct": config for name, config in INSTRUCT.items()},
}

BIASES = {
    "layers.*.attention.wq.bias": "model.layers.*.self_attn.q_proj.bias",
    "layers.*.attention.wk.bias": "model.layers.*.self_attn.k_proj.bias",
    "layers.*.attention.wv.bias": "model.layers.*.self_attn.v_proj.bias",
}
HF = HFFormat(
    architecture="Qwen2ForCausalLM",
    model_type="qwen2",
    sizes=llama3.SIZES,
    names={**llama3.HF.names, **BIASES},
    rotary=llama3.HF.rotary | {"layers.*.attention.wq.bias", "layers.*.attention.wk.bias"},
    # without use_sliding_window, sliding_window and max_window_layers have no effect
    fixed={"hidden_act": "silu", "mlp_bias": False, "use_sliding_window": False},
    each_layer={"layer_types": "full_attention"},
)


SPEC = replace(llama3.SPEC, name="qwen2", flavors=FLAVORS, hf=HF)
