"""Mistral 7B: its sizes, and sliding-window attention (arXiv:2310.06825).

All else is Llama's, including the initial weights. `7B-v0.1` is the first version. `7B` is version
0.3, which like 0.2 has no window. `tiny`, `tiny8` and `debugmodel` are for tests, with windows that
short sequences exceed.
"""

from __future__ import annotations

from dataclasses import replace

from torchtitan.models import llama3
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import HFFormat, Size

LARGE = DecoderConfig(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14_336,
    vocab_size=32_768,
    rope_theta=1_000_000.0,
)
FIRST = replace(LARGE, vocab_size=32_000, rope_theta=10_000.0, window=4096)

FLAVORS = {
    "tiny": replace(llama3.FLAVORS["tiny"], rope_theta=10_000.0, window=7),
    "tiny8": replace(llama3.FLAVORS["tiny8"], rope_theta=10_000.0, window=7),
    "debugmodel": replace(llama3.SMALL, num_kv_heads=4, rope_theta=10_000.0, window=64),
    "7B-v0.1": FIRST,
    "7B": LARGE,
}

HF = HFFormat(
    architecture="MistralForCausalLM",
    model_type="mistral",
    names=llama3.HF.names,
    rotary=llama3.HF.rotary,
    fixed={"hidden_act": "silu", "attention_bias": False, "mlp_bias": False},
    sizes={**llama3.SIZES, "sliding_window": Size("window", default=4096)},
)

SPEC = replace(llama3.SPEC, name="mistral", flavors=FLAVORS, hf=HF)
