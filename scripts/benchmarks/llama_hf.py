"""The same model as `transformers` builds it: equal sizes, equal weights.

Only the rotary embedding is laid out differently: there channel i turns with i + D/2, here with its
neighbour, so the rows of wq and wk change places, head by head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtitan.models.decoder import Decoder
from torchtitan.models.spec import DecoderConfig

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
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w2": "mlp.down_proj",
    "feed_forward.w3": "mlp.up_proj",
}


def build_llama(model: Decoder) -> nn.Module:
    """Build transformers' Llama with the weights of `model`, for training.

    Raises:
        ImportError: transformers is missing.
    """
    import transformers

    with torch.device("meta"):
        llama = transformers.LlamaForCausalLM(_config(model.config))
    llama.to_empty(device=next(model.parameters()).device)
    # its only buffers are the frequencies, which meta construction has lost
    llama.model.rotary_emb = type(llama.model.rotary_emb)(llama.config).to(llama.device)
    rows = dict(map(_translate, model.state_dict().items()))
    heads = model.config.head_dim
    for name, weight in rows.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            # neighbouring channel pairs -> first half with second half
            rows[name] = weight.unflatten(0, (-1, heads // 2, 2)).transpose(1, 2).flatten(0, 2)
    missing, unexpected = llama.load_state_dict(rows, strict=False)
    tied = ["lm_head.weight"] if model.config.tie_embeddings else []
    assert (missing, unexpected) == (tied, []), (missing, unexpected)
    llama.tie_weights()
    trained: nn.Module = llama.train()
    return trained


def _translate(item: tuple[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    name, weight = item
    layer, _, rest = name.removeprefix("layers.").partition(".")
    prefix, key = (f"model.layers.{layer}.", rest) if name.startswith("layers.") else ("", name)
    return f"{prefix}{NAMES[key.removesuffix('.weight')]}.weight", weight


def _config(config: DecoderConfig) -> Any:
    import transformers

    assert config.rope_scaling is None, "sizes to benchmark have plain rotary embeddings"
    return transformers.LlamaConfig(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.hidden_dim,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.num_heads,
        num_key_value_heads=config.num_kv_heads,
        rms_norm_eps=config.norm_eps,
        rope_theta=config.rope_theta,
        tie_word_embeddings=config.tie_embeddings,
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
