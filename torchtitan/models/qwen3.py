"""Qwen3, dense: its sizes, and where it differs from Llama (arXiv:2505.09388).

Each query and key head is normalized before it is rotated, and heads are 128 wide for every width
of the residual stream. All else is taken from Llama: the other roles under tensor parallelism,
names and initial weights. `tiny`, `tiny8` and `small` are for tests, with heads that are not
dim / num_heads wide; `tiny8` has tied embeddings, like the small models of Qwen.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import HFFormat, ModelSpec, TensorRole

LARGE = DecoderConfig(
    dim=4096,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=12_288,
    vocab_size=151_936,
    norm_eps=1e-6,
    rope_theta=1_000_000.0,
    head_dim=128,
    qk_norm=True,
)
TIED = replace(LARGE, tie_embeddings=True)
"""Common to the sizes up to 4B."""

FLAVORS = {
    "tiny": llama3.small_flavors(LARGE, head_dim=12)["tiny"],
    "tiny8": llama3.small_flavors(TIED, head_dim=6)["tiny8"],
    "small": replace(
        LARGE,
        dim=256,
        num_layers=6,
        num_heads=8,
        num_kv_heads=4,
        hidden_dim=768,
        vocab_size=2048,
        head_dim=64,
    ),
    "debugmodel": replace(
        TIED, dim=256, num_layers=8, num_heads=16, hidden_dim=3072, vocab_size=2048
    ),
    "0.6B": replace(TIED, dim=1024, num_layers=28, num_heads=16, hidden_dim=3072),
    "1.7B": replace(TIED, dim=2048, num_layers=28, num_heads=16, hidden_dim=6144),
    "4B": replace(TIED, dim=2560, hidden_dim=9728),
    "8B": LARGE,
    "14B": replace(LARGE, dim=5120, num_layers=40, num_heads=40, hidden_dim=17_408),
    "32B": replace(LARGE, dim=5120, num_layers=64, num_heads=64, hidden_dim=25_600),
}

TENSOR_PLAN: dict[str, TensorRole] = {
    **llama3.TENSOR_PLAN,
    "layers.*.attention.q_norm": "head_norm",
    "layers.*.attention.k_norm": "head_norm",
}

HEAD_NORMS = {
    "layers.*.attention.q_norm.weight": "model.layers.*.self_attn.q_norm.weight",
    "layers.*.attention.k_norm.weight": "model.layers.*.self_attn.k_norm.weight",
}
HF = HFFormat(
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    sizes=llama3.SIZES,
    names={**llama3.HF.names, **HEAD_NORMS},
    rotary=llama3.HF.rotary | HEAD_NORMS.keys(),
    fixed={"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False},
    each_layer={"layer_types": "full_attention"},
)


SPEC = ModelSpec(
    name="qwen3",
    flavors=FLAVORS,
    build=llama3.Llama3,
    tensor_plan=TENSOR_PLAN,
    stages=True,
    hf=HF,
    torchtitan_rope="halves",
)
