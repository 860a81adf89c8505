"""From a job's settings to what its Hugging Face folder holds."""

from __future__ import annotations

from pathlib import Path

import torch

from torchtitan.assemble.model import find_model
from torchtitan.config.toml_files import to_toml
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.hf.beside import carried_over, files_to_copy, tokenizer_file
from torchtitan.hf.card import Card, find_hub_id, find_license, shown
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
        card=describe_card(config).text,
    )


def describe_card(config: Config) -> Card:
    """Describe what the model card of a job's exports says."""
    training, checkpoint, lora = config.training, config.checkpoint, config.lora
    base = None if checkpoint.initial_load_path is None else Path(checkpoint.initial_load_path)
    names = [f"`{shown(path)}`" for path in training.paths] or [f"`{training.dataset}`"]
    if training.weights:
        shares = zip(names, training.weights, strict=True)
        names = [f"{name} (weight {weight:g})" for name, weight in shares]
    job = config.job
    return Card(
        name=Path(job.dump_folder).resolve().name,
        description="" if job.description == type(job)().description else job.description,
        base=None if base is None else find_hub_id(base) or shown(str(base)),
        base_id=None if base is None else find_hub_id(base),
        license={} if base is None else find_license(base),
        data=names,
        template=training.chat_template and shown(training.chat_template),
        tokenizer=shown(config.model.tokenizer_path),
        has_tokenizer=tokenizer_file(config.model.tokenizer_path) is not None,
        seq_len=training.seq_len,
        lr=config.optimizer.lr,
        decay=config.lr_scheduler.decay_type,
        optimizer=config.optimizer.name,
        rank=lora.rank,
        alpha=lora.alpha,
        alone=lora.save == "adapter",
        settings=to_toml(config),
        checkpoint_folder=Path(checkpoint.folder),
    )


def chosen_rotation(settings: ModelConfig) -> set[str]:
    """Return which sizes of the rotation a job sets itself: it may start from other ones."""
    chosen = {
        "rope_theta": settings.rope_theta is not None,
        "rope_scaling": settings.rope_scaling.type != "flavor",
    }
    return {name for name, is_set in chosen.items() if is_set}
