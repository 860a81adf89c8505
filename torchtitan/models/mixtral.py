"""Mixtral: its sizes, and where it differs from Mistral: layers have experts (arXiv:2401.04088).

The router takes a softmax over the chosen experts. `hidden_dim` is the width of an expert.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3, qwen3_moe
from torchtitan.models.sizes import MoEConfig
from torchtitan.models.spec import HFFormat, Size

SMALL = MoEConfig(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14_336,
    vocab_size=32_000,
    rope_theta=1_000_000.0,
    num_experts=8,
    num_experts_per_token=2,
)
LARGE = replace(SMALL, dim=6144, num_layers=56, num_heads=48, hidden_dim=16_384, vocab_size=32_768)
FLAVORS = {**llama3.small_flavors(SMALL), "8x7B": SMALL, "8x22B": LARGE}

LAYER = "model.layers.*.block_sparse_moe"
HF = HFFormat(
    architecture="MixtralForCausalLM",
    model_type="mixtral",
    names={
        **{ours: name for ours, name in llama3.HF.names.items() if ".feed_forward." not in ours},
        "layers.*.moe.router.gate.weight": f"{LAYER}.gate.weight",
        **{f"layers.*.moe.experts.w{i}": f"{LAYER}.experts.#.w{i}.weight" for i in (1, 2, 3)},
    },
    rotary=llama3.HF.rotary,
    fixed={"hidden_act": "silu", "router_jitter_noise": 0.0},
    sizes={
        **llama3.SIZES,
        "rms_norm_eps": Size("norm_eps", float, default=1e-5),
        "rope_theta": Size("rope_theta", float, default=1e6),
        "sliding_window": Size("window", default=None),
        "num_local_experts": Size("num_experts", default=8),
        "num_experts_per_tok": Size("num_experts_per_token", default=2),
    },
)

SPEC = replace(
    llama3.SPEC,
    name="mixtral",
    flavors=FLAVORS,
    hf=HF,
    build=qwen3_moe.Qwen3MoE,
    tensor_plan=qwen3_moe.TENSOR_PLAN,
)
