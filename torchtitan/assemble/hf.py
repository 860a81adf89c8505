"""From a job's settings to what its Hugging Face folder holds."""

from __future__ import annotations

from pathlib import Path

import torch

from torchtitan.assemble.model import find_model
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.hf.beside import carried_over, files_to_copy
from torchtitan.hf.names import Names
from torchtitan.hf.write import HFExport
from torchtitan.job import Config
from torchtitan.lora.export import LoRAExport, weight_beside
from torchtitan.models.settings import ModelConfig


def describe_export(config: Config, *, dtype: torch.dtype | None) -> HFExport:
    """Describe the folder of a job's weights, in `dtype`, None: as they are stored.

    Raises:
        UserError: The job's tokenizer, or the folder that it began from, is damaged or not there.
    """
    spec, architecture = find_model(config.model)
    checkpoint, tokenizer_path = config.checkpoint, config.model.tokenizer_path
    path = checkpoint.initial_load_path if checkpoint.initial_load_in_hf else None
    return HFExport(
        names=Names(spec.hf, architecture, weight_beside),
        dtype=dtype,
        carried=carried_over(
            None if path is None else Path(path),
            seq_len=config.training.seq_len,
            eos_id=build_tokenizer(tokenizer_path).eos_id,
        ),
        adapter=LoRAExport.of(config.lora, base=checkpoint.initial_load_path),
        files=files_to_copy(tokenizer_path, chat_template=config.training.chat_template),
    )


def chosen_rotation(settings: ModelConfig) -> set[str]:
    """Return which sizes of the rotation a job sets itself: it may start from other ones."""
    chosen = {
        "rope_theta": settings.rope_theta is not None,
        "rope_scaling": settings.rope_scaling.type != "flavor",
    }
    return {name for name, is_set in chosen.items() if is_set}
