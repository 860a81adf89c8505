"""The public models of `transformers` as oracles: the same weights in their layout."""

from __future__ import annotations

import dataclasses

import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from torchtitan.models import deepseek_v2, deepseek_v3
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.sizes import DecoderConfig, MLAConfig, MoEConfig, RopeScaling

NAMES = {
    "tok_embeddings": "model.embed_tokens",
    "norm": "model.norm",
    "output": "lm_head",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
    "moe.router.gate": "mlp.gate",
    "moe.shared_experts.w1": "mlp.shared_experts.gate_proj",
    "moe.shared_experts.w2": "mlp.shared_experts.down_proj",
    "moe.shared_experts.w3": "mlp.shared_experts.up_proj",
}
LATENT_NAMES = {
    **NAMES,
    "attention.wq_a": "self_attn.q_a_proj",
    "attention.q_norm": "self_attn.q_a_layernorm",
    "attention.wq_b": "self_attn.q_b_proj",
    "attention.wkv_a": "self_attn.kv_a_proj_with_mqa",
    "attention.kv_norm": "self_attn.kv_a_layernorm",
    "attention.wkv_b": "self_attn.kv_b_proj",
}

TINY = DecoderConfig(
    dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=96, vocab_size=263
)
EXPERTS = MoEConfig(
    **{
        **vars(TINY),
        "qk_norm": True,
        "head_dim": 12,
        "num_experts": 5,
        "num_experts_per_token": 2,
        "expert_hidden_dim": 20,
    }
)
LATENT = deepseek_v3.TINY
VARIANTS = {
    "grouped": TINY,
    "single kv head": dataclasses.replace(TINY, num_kv_heads=1, rope_theta=10_000.0),
    "ungrouped": dataclasses.replace(TINY, num_kv_heads=4, norm_eps=1e-2),
    # a short original context, so that a short sequence meets all three kinds of wavelength
    "scaled": dataclasses.replace(
        TINY,
        rope_theta=100.0,
        rope_scaling=RopeScaling(type="llama3", factor=8.0, original_max_position=64),
    ),
    "interpolated": dataclasses.replace(
        TINY, rope_theta=100.0, rope_scaling=RopeScaling(type="linear", factor=4.0)
    ),
    "yarn": dataclasses.replace(
        TINY,
        rope_theta=100.0,
        rope_scaling=RopeScaling(type="yarn", factor=8.0, original_max_position=256),
    ),
    "yarn by hand": dataclasses.replace(
        TINY,
        rope_theta=50.0,
        rope_scaling=RopeScaling(
            type="yarn",
            factor=8.0,
            original_max_position=64,
            beta_fast=4.0,
            beta_slow=0.5,
            attention_factor=1.5,
        ),
    ),
    "tied": dataclasses.replace(TINY, tie_embeddings=True),
    "wide heads": dataclasses.replace(TINY, head_dim=12),
    "normed heads": dataclasses.replace(TINY, qk_norm=True, head_dim=12, norm_eps=1e-2),
    "normed heads, tied": dataclasses.replace(
        TINY, num_heads=3, num_kv_heads=1, qk_norm=True, head_dim=16, tie_embeddings=True
    ),
    "biased": dataclasses.replace(TINY, qkv_bias=True),
    "biased, tied": dataclasses.replace(
        TINY, num_kv_heads=1, qkv_bias=True, tie_embeddings=True, rope_theta=10_000.0
    ),
    "window": dataclasses.replace(TINY, window=7),
    "window of one": dataclasses.replace(TINY, window=1, num_kv_heads=1),
    "experts": EXPERTS,
    "experts, first layer dense": dataclasses.replace(
        EXPERTS, num_dense_layers=1, norm_expert_weights=False, num_experts_per_token=3
    ),
    "latent": LATENT,
    "latent, wide values": dataclasses.replace(
        LATENT,
        q_lora_rank=None,
        v_head_dim=28,
        rope_scaling=None,
        norm_eps=1e-2,
        num_dense_layers=None,
        num_expert_groups=None,
        num_limited_groups=None,
        norm_expert_weights=False,
    ),
    "latent, softmax": deepseek_v2.FLAVORS["tiny"],
}
PUBLIC: dict[str, tuple[type[PretrainedConfig], type[PreTrainedModel]]] = {
    "llama3": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
}


def family_name(config: DecoderConfig) -> str:
    """Name the family that has what a model of these sizes has; Llama has nothing of its own."""
    if isinstance(config, MLAConfig):
        return "deepseek_v3" if config.expert_score == "sigmoid" else "deepseek_v2"
    if isinstance(config, MoEConfig):
        return "gpt_oss" if config.has_sinks else "qwen3_moe"
    if config.norm_placement == "both":
        return "gemma3"
    if config.layer_pattern is not None:
        return "smollm3"
    if config.window is not None:
        return "mistral"
    return "qwen2" if config.qkv_bias else "qwen3" if config.qk_norm else "llama3"


def new_decoder(config: DecoderConfig) -> Decoder:
    """Build a decoder of these sizes, with weights that say nothing."""
    model = MODELS[family_name(config)].build(config)
    assert isinstance(model, Decoder)
    return model


def random_decoder(config: DecoderConfig) -> Decoder:
    """Build a decoder whose every parameter matters to the logits, norms included."""
    model = new_decoder(config)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(mean=float(parameter.ndim == 1), std=0.3, generator=generator)
    return model


def reference_of(model: Decoder) -> PreTrainedModel:
    """Build the public model with the same weights, float32."""
    reference = public_model(reference_config(model.config)).eval()
    missing, unexpected = reference.load_state_dict(_translate(model), strict=False)
    assert not unexpected
    assert missing == (["lm_head.weight"] if model.config.tie_embeddings else [])
    return reference


def public_model(config: PretrainedConfig) -> PreTrainedModel:
    """Build the public model of these sizes."""
    [model] = [model for kind, model in PUBLIC.values() if kind is type(config)]
    return model(config)


def reference_config(config: DecoderConfig) -> PretrainedConfig:
    """Say the sizes in the words of the public model."""
    family, _ = PUBLIC[family_name(config)]
    own: dict[str, object] = {"sliding_window": config.window} if family is MistralConfig else {}
    own["head_dim"] = config.head_width
    if isinstance(config, MLAConfig):
        own = {
            "q_lora_rank": config.q_lora_rank,
            "kv_lora_rank": config.kv_lora_rank,
            "qk_nope_head_dim": config.qk_nope_head_dim,
            "qk_rope_head_dim": config.qk_rope_head_dim,
            "v_head_dim": config.v_head_dim,
            "n_routed_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "moe_intermediate_size": config.expert_hidden_dim,
            "n_shared_experts": config.num_shared_experts,
            "first_k_dense_replace": config.num_dense_layers or 0,
            "n_group": config.num_expert_groups or 1,
            "topk_group": config.num_limited_groups or 1,
            "norm_topk_prob": config.norm_expert_weights,
            "routed_scaling_factor": config.expert_weight_scale,
        }
    elif isinstance(config, MoEConfig):
        own |= {
            "num_experts": config.num_experts,
            "num_experts_per_tok": config.num_experts_per_token,
            "moe_intermediate_size": config.expert_hidden_dim,
            "norm_topk_prob": config.norm_expert_weights,
            "mlp_only_layers": list(range(config.num_dense_layers or 0)),
        }
    return family(
        **own,
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.norm_eps,
        max_position_embeddings=131_072,
        rope_theta=config.rope_theta,
        rope_scaling=reference_scaling(config.rope_scaling),
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )


def reference_scaling(scaling: RopeScaling | None) -> dict[str, object] | None:
    """Say the stretch of the wavelengths in the words of the public model."""
    if scaling is None:
        return None
    words = {"original_max_position": "original_max_position_embeddings"}
    values = {words.get(key, key): value for key, value in scaling.used.items()}
    values = {key: value for key, value in values.items() if value is not None}
    return {"rope_type": scaling.type, **values}


def _translate(model: Decoder) -> dict[str, torch.Tensor]:
    translated = {}
    is_latent = isinstance(model.config, MLAConfig)
    rotary = ("attention.wq", "attention.wk", "attention.q_norm", "attention.k_norm")
    for name, weight in model.state_dict().items():
        layer, _, rest = name.removeprefix("layers.").partition(".")
        prefix, key = (f"model.layers.{layer}.", rest) if name.startswith("layers.") else ("", name)
        key, _, kind = key.rpartition(".")
        if key in rotary and not is_latent:
            # neighbouring channel pairs -> first half with second half, head by head
            head_dim = model.config.head_width
            weight = weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
        if key == "moe.experts":  # in memory theirs are stacked too, the first two in one
            translated[f"{prefix}mlp.experts.{kind}"] = weight
        elif kind == "expert_bias":
            translated[f"{prefix}mlp.gate.e_score_correction_bias"] = weight
        else:
            names = LATENT_NAMES if is_latent else NAMES
            translated[f"{prefix}{names[key]}.{kind}"] = weight
    for name in [name for name in translated if name.endswith("experts.w1")]:
        stacks = {w: translated.pop(f"{name[:-1]}{w}") for w in "123"}
        where = name.removesuffix("w1")
        translated[f"{where}gate_up_proj"] = torch.cat([stacks["1"], stacks["3"]], dim=1)
        translated[f"{where}down_proj"] = stacks["2"]
    return translated
