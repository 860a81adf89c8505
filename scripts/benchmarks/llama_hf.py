"""The same model as `transformers` builds it: equal sizes, equal weights.

Names, rows and sizes are translated as for files of Hugging Face (`torchtitan/hf`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torchtitan.checkpoint.rows import to_their_rows
from torchtitan.hf.config import sizes_of
from torchtitan.hf.names import Names
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.sizes import DecoderConfig


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
    names = Names(MODELS["llama3"].hf, model.config)
    rows = {
        names.theirs(ours): to_their_rows(weight, head_dim=names.head_dim(ours))
        for ours, weight in model.state_dict().items()
    }
    missing, unexpected = llama.load_state_dict(rows, strict=False)
    tied = ["lm_head.weight"] if model.config.tie_embeddings else []
    assert (missing, unexpected) == (tied, []), (missing, unexpected)
    llama.tie_weights()
    trained: nn.Module = llama.train()
    return trained


def _config(config: DecoderConfig) -> Any:
    import transformers

    return transformers.LlamaConfig(
        **sizes_of(config),
        attn_implementation="sdpa",
        use_cache=False,
        bos_token_id=None,
        eos_token_id=None,
    )
