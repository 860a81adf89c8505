"""Qwen3 with a mixture of experts: its sizes, and the experts' initial weights and names.

Attention, norms and dense layers are Qwen3's (arXiv:2505.09388). The router takes a softmax over
all experts, and the weights of the chosen ones are divided by their sum. `tiny`, `tiny8` and
`debugmodel` are for tests. The first layer of `tiny8` is dense. `debugmodel` multiplies a token by
the same number of weights as Qwen3's dense `small`.
"""

from __future__ import annotations

import math

from torchtitan.models import llama3, qwen3
from torchtitan.models.init import Constant, Init, Normal
from torchtitan.models.moe import MoEDecoder
from torchtitan.models.sizes import DecoderConfig, MoEConfig
from torchtitan.models.spec import HFFormat, ModelSpec, Size, TensorRole


def _with_experts(dense: DecoderConfig, **sizes: int) -> MoEConfig:
    return MoEConfig(**{**vars(dense), **sizes})


FLAVORS = {
    "tiny": _with_experts(
        qwen3.FLAVORS["tiny"], num_experts=8, num_experts_per_token=2, expert_hidden_dim=24
    ),
    "tiny8": _with_experts(
        qwen3.FLAVORS["tiny8"],
        tie_embeddings=False,
        num_experts=8,
        num_experts_per_token=2,
        expert_hidden_dim=24,
        num_dense_layers=1,
    ),
    "debugmodel": _with_experts(
        qwen3.FLAVORS["small"], num_experts=16, num_experts_per_token=4, expert_hidden_dim=192
    ),
    "30B-A3B": _with_experts(
        qwen3.LARGE,
        dim=2048,
        num_layers=48,
        num_kv_heads=4,
        hidden_dim=6144,
        num_experts=128,
        num_experts_per_token=8,
        expert_hidden_dim=768,
    ),
    "235B-A22B": _with_experts(
        qwen3.LARGE,
        num_layers=94,
        num_heads=64,
        num_kv_heads=4,
        num_experts=128,
        num_experts_per_token=8,
        expert_hidden_dim=1536,
    ),
}

TENSOR_PLAN: dict[str, TensorRole] = {
    **qwen3.TENSOR_PLAN,
    "layers.*.moe": "route",
    "layers.*.moe.router.gate": "gate",
    "layers.*.moe.experts": "experts",
    "layers.*.moe.shared_experts": "gather",
    "layers.*.moe.shared_experts.w1": "column",
    "layers.*.moe.shared_experts.w3": "column",
    "layers.*.moe.shared_experts.w2": "row",
}

HF = HFFormat(
    architecture="Qwen3MoeForCausalLM",
    model_type="qwen3_moe",
    names={
        **qwen3.HF.names,
        "layers.*.moe.router.gate.weight": "model.layers.*.mlp.gate.weight",
        "layers.*.moe.experts.w1": "model.layers.*.mlp.experts.#.gate_proj.weight",
        "layers.*.moe.experts.w3": "model.layers.*.mlp.experts.#.up_proj.weight",
        "layers.*.moe.experts.w2": "model.layers.*.mlp.experts.#.down_proj.weight",
    },
    rotary=qwen3.HF.rotary,
    fixed={**qwen3.HF.fixed, "decoder_sparse_step": 1},
    each_layer=qwen3.HF.each_layer,
    sizes={
        **qwen3.HF.sizes,
        "num_experts": Size("num_experts", default=128),
        "num_experts_per_tok": Size("num_experts_per_token", default=8),
        "moe_intermediate_size": Size("expert_hidden_dim", default=768),
        "norm_topk_prob": Size("norm_expert_weights", bool, default=False),
        "mlp_only_layers": Size("num_dense_layers", list, default=[]),
    },
    aliases={"num_local_experts": "num_experts"},
)


class Qwen3MoE(MoEDecoder, llama3.Llama3):
    """The decoder with experts and Qwen3's initial weights."""

    def initial(self, name: str) -> Init:
        """Return how a parameter is initialized: experts like a dense feed-forward."""
        match name.split("."):
            case [*_, "experts", "b1" | "b2" | "b3"]:
                return Constant(0.0)
            case ["layers", _, "moe", "router", "gate", "weight"] | [*_, "experts", "w1"]:
                return Normal(std=0.02)
            case [*_, "shared_experts", "w1", "weight"]:
                return Normal(std=0.02)
            case ["layers", _, "moe", "expert_bias"]:
                return Constant(0.0)
            case ["layers", layer, "moe", "experts" | "shared_experts", "w2" | "w3", *_]:
                return Normal(std=0.02 / math.sqrt(2 * (int(layer) + 1)))
        return super().initial(name)


SPEC = ModelSpec(
    name="qwen3_moe",
    flavors=FLAVORS,
    build=Qwen3MoE,
    tensor_plan=TENSOR_PLAN,
    stages=True,
    hf=HF,
    torchtitan_rope="halves",
)
