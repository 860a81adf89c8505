"""Llama 3: its sizes and its initial weights (arXiv:2407.21783).

The architecture is `Decoder`. A family is one file like this: sizes, the roles of modules under
tensor parallelism and the names in Hugging Face's files are data, and initial weights are a pure
function of a parameter's name. Flavors with names of torchtitan 0.2 are the same models there.

`small` is `debugmodel` without rope scaling. `tiny` has an odd vocabulary and sizes that few
degrees divide, for tests of uneven shards. `tiny8` has eight layers and sizes divisible by 4, for
tests of tensor and pipeline parallelism. `narrow` has two heads, so that a CPU can attend over 128k
tokens. `100M` has a small vocabulary, so that most of it is layers, for measurements on one
machine.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torchtitan.models.decoder import Decoder
from torchtitan.models.init import Constant, Init, Normal
from torchtitan.models.sizes import DecoderConfig, RopeScaling
from torchtitan.models.spec import HFFormat, ModelSpec, Size, TensorRole

LLAMA_31 = RopeScaling(type="llama3", factor=8.0, original_max_position=8192)
LLAMA_32 = RopeScaling(type="llama3", factor=32.0, original_max_position=8192)

LARGE = DecoderConfig(
    dim=4096,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    hidden_dim=14_336,
    vocab_size=128_256,
    rope_scaling=LLAMA_31,
)
TIED = replace(LARGE, hidden_dim=8192, rope_scaling=LLAMA_32, tie_embeddings=True)
"""Common to Llama 3.2's text models."""
SMALL = DecoderConfig(
    dim=256, num_layers=6, num_heads=16, num_kv_heads=16, hidden_dim=768, vocab_size=2048
)
TINY = replace(SMALL, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96)

FLAVORS = {
    "tiny": replace(TINY, vocab_size=263),
    "tiny8": replace(TINY, num_layers=8, num_heads=8, num_kv_heads=4, vocab_size=264),
    "narrow": replace(TINY, dim=64, num_heads=2, num_kv_heads=1, hidden_dim=192),
    "small": SMALL,
    "debugmodel": replace(SMALL, rope_scaling=LLAMA_31),
    "100M": DecoderConfig(
        dim=768, num_layers=12, num_heads=12, num_kv_heads=4, hidden_dim=2048, vocab_size=16_384
    ),
    "1B": replace(TIED, dim=2048, num_layers=16),
    "3B": replace(TIED, dim=3072, num_layers=28, num_heads=24),
    "8B": LARGE,
    "70B": replace(LARGE, dim=8192, num_layers=80, num_heads=64, hidden_dim=28_672),
    "405B": replace(LARGE, dim=16_384, num_layers=126, num_heads=128, hidden_dim=53_248),
}


def small_flavors(config: DecoderConfig, **sizes: Any) -> dict[str, DecoderConfig]:
    """Return the flavors for tests of a family: `config` in Llama's sizes, and with `sizes`."""
    names = ("dim", "num_layers", "num_heads", "num_kv_heads", "hidden_dim", "vocab_size")
    return {
        flavor: replace(config, **{n: getattr(FLAVORS[flavor], n) for n in names}, **sizes)
        for flavor in ("tiny", "tiny8", "debugmodel")
    }


TENSOR_PLAN: dict[str, TensorRole] = {
    "tok_embeddings": "vocabulary",
    "layers.*.attention_norm": "norm",
    "layers.*.attention": "gather",
    "layers.*.attention.wq": "column",
    "layers.*.attention.wk": "column",
    "layers.*.attention.wv": "column",
    "layers.*.attention.wo": "row",
    "layers.*.ffn_norm": "norm",
    "layers.*.feed_forward": "gather",
    "layers.*.feed_forward.w1": "column",
    "layers.*.feed_forward.w3": "column",
    "layers.*.feed_forward.w2": "row",
    "norm": "norm",
    "output": "head",
}

SIZES = {
    "hidden_size": Size("dim"),
    "intermediate_size": Size("hidden_dim"),
    "num_hidden_layers": Size("num_layers"),
    "num_attention_heads": Size("num_heads"),
    "num_key_value_heads": Size("num_kv_heads", default="num_attention_heads"),
    "head_dim": Size("head_dim", default=None),
    "vocab_size": Size("vocab_size"),
    "rms_norm_eps": Size("norm_eps", float, default=1e-6),
    "tie_word_embeddings": Size("tie_embeddings", bool, default=False),
}
HF = HFFormat(
    architecture="LlamaForCausalLM",
    model_type="llama",
    sizes=SIZES,
    names={
        "tok_embeddings.weight": "model.embed_tokens.weight",
        "layers.*.attention_norm.weight": "model.layers.*.input_layernorm.weight",
        "layers.*.attention.wq.weight": "model.layers.*.self_attn.q_proj.weight",
        "layers.*.attention.wk.weight": "model.layers.*.self_attn.k_proj.weight",
        "layers.*.attention.wv.weight": "model.layers.*.self_attn.v_proj.weight",
        "layers.*.attention.wo.weight": "model.layers.*.self_attn.o_proj.weight",
        "layers.*.ffn_norm.weight": "model.layers.*.post_attention_layernorm.weight",
        "layers.*.feed_forward.w1.weight": "model.layers.*.mlp.gate_proj.weight",
        "layers.*.feed_forward.w3.weight": "model.layers.*.mlp.up_proj.weight",
        "layers.*.feed_forward.w2.weight": "model.layers.*.mlp.down_proj.weight",
        "norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    },
    rotary=frozenset({"layers.*.attention.wq.weight", "layers.*.attention.wk.weight"}),
    fixed={
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "sliding_window": None,
    },
)


class Llama3(Decoder):
    """The decoder with Llama 3's initial weights."""

    def initial(self, name: str) -> Init:
        """Return torchtitan's standard deviations, truncated at 3.

        A tied embedding has 0.02, as in published models: wider rows would make a token predict
        itself. Embedded tokens that are multiplied start as large as those that are not.
        Matrices that write into the residual stream (wo, w2, and w3, which scales w2's input) are
        smaller in deeper layers, so that the variance of the stream does not grow with depth. Norms
        start as 1, biases as 0.
        """
        tied, factor = self.config.tie_embeddings, self.config.embedding_factor
        match name.split("."):
            case ["tok_embeddings", "weight"]:
                return Normal(std=(0.02 if tied else 1.0) / factor)
            case ["layers", _, "attention", "wq" | "wk" | "wv" | "sinks", "weight"]:
                return Normal(std=0.02)
            case ["layers", _, "feed_forward", "w1", "weight"]:
                return Normal(std=0.02)
            case ["layers", layer, "attention", "wo", "weight"]:
                return Normal(std=0.02 / math.sqrt(2 * (int(layer) + 1)))
            case ["layers", layer, "feed_forward", "w2" | "w3", "weight"]:
                return Normal(std=0.02 / math.sqrt(2 * (int(layer) + 1)))
            case [*_, norm, "weight"] if norm.endswith("norm"):
                return Constant(0.0 if self.config.norm_offset else 1.0)
            case [*_, "bias"]:
                return Constant(0.0)
            case ["output", "weight"]:
                return Normal(std=self.config.dim**-0.5)
        raise AssertionError(f"no rule initializes the parameter {name}")


SPEC = ModelSpec(
    name="llama3", flavors=FLAVORS, build=Llama3, tensor_plan=TENSOR_PLAN, stages=True, hf=HF
)
