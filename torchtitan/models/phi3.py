"""Phi-3 and Phi-4: their sizes, and where their files differ from Llama's (arXiv:2412.08905).

The files store wq, wk and wv as the rows of one tensor, w1 and w3 too. The layers are Llama's, in
Phi-3 with a window. Models with LongRoPE, such as Phi-4-mini, are refused.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import Size

PHI_3 = DecoderConfig(
    dim=3072,
    num_layers=32,
    num_heads=32,
    num_kv_heads=32,
    hidden_dim=8192,
    vocab_size=32_064,
    rope_theta=10_000.0,
    window=2047,
)
PHI_4 = DecoderConfig(
    dim=5120,
    num_layers=40,
    num_heads=40,
    num_kv_heads=10,
    hidden_dim=17_920,
    vocab_size=100_352,
    rope_theta=250_000.0,
)
FLAVORS = {**llama3.small_flavors(PHI_3, window=7), "mini-4k": PHI_3, "phi-4": PHI_4}

QKV, GATE_UP = "model.layers.*.self_attn.qkv_proj.weight", "model.layers.*.mlp.gate_up_proj.weight"
FUSED = {
    **{f"layers.*.attention.{w}.weight": QKV for w in ("wq", "wk", "wv")},
    **{f"layers.*.feed_forward.{w}.weight": GATE_UP for w in ("w1", "w3")},
}
HF = replace(
    llama3.HF,
    architecture="Phi3ForCausalLM",
    model_type="phi3",
    names={**FUSED, **llama3.HF.names, **FUSED},  # a key stays where it came first
    fixed={"hidden_act": "silu", "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    sizes={
        **llama3.SIZES,
        "rms_norm_eps": Size("norm_eps", float, default=1e-5),
        "sliding_window": Size("window", default=None),
    },
    implied={"rope_scaling": None},
)

SPEC = replace(llama3.SPEC, name="phi3", flavors=FLAVORS, hf=HF)
