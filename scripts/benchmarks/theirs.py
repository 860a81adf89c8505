"""The same model as `transformers` builds it: equal sizes, equal weights.

Names, rows and sizes are translated as for files of Hugging Face (`torchtitan/hf`).
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from torchtitan.checkpoint.rows import to_their_rows
from torchtitan.hf.config import new_config
from torchtitan.hf.names import CONFIG, WEIGHTS, Names
from torchtitan.models.decoder import Decoder
from torchtitan.models.spec import EACH, ModelSpec


def build_theirs(model: Decoder, spec: ModelSpec, **options: Any) -> nn.Module:
    """Build transformers' model of a family with the weights of `model`, for training.

    Raises:
        ImportError: transformers is missing.
    """
    from transformers import AutoModelForCausalLM

    config = new_config(model.config, format=spec.hf, dtype=torch.float32, carried={})
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / CONFIG).write_text(json.dumps(config), encoding="utf-8")
        save_file(_weights(model, spec), Path(folder) / WEIGHTS, metadata={"format": "pt"})
        theirs: Any = AutoModelForCausalLM.from_pretrained(
            folder, attn_implementation="sdpa", **options
        )
    theirs.config.use_cache = False
    trained: nn.Module = theirs.to(next(model.parameters()).device).train()
    return trained


def _weights(model: Decoder, spec: ModelSpec) -> dict[str, Tensor]:
    names = Names(spec.hf, model.config)
    found: dict[str, Tensor] = {}
    for ours, weight in model.state_dict().items():
        theirs = names.to_hf(ours)
        rows = to_their_rows(weight, head_dim=names.rope_head_dim(ours)).contiguous()
        if EACH in theirs:
            found |= {theirs.replace(EACH, str(i)): one.clone() for i, one in enumerate(rows)}
        else:
            found[theirs] = rows
    return found
