"""From a job's settings to what its Hugging Face folder holds."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import DataError
from torchtitan.data.settings import SUPERVISED
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.chat_files import find_template
from torchtitan.finetune.lora_export import LoRAExport, weight_beside
from torchtitan.hf.beside import (
    GENERATION_CONFIG,
    carried_over,
    files_to_copy,
    generation_config,
    tokenizer_file,
)
from torchtitan.hf.card import Card, shown
from torchtitan.hf.names import Names
from torchtitan.hf.write import HFExport
from torchtitan.job import Config
from torchtitan.layout import find_model
from torchtitan.models.settings import ModelConfig

logger = logging.getLogger(__name__)


def describe_export(config: Config, *, dtype: torch.dtype | None) -> HFExport:
    """Describe the folder of a job's weights, in `dtype`, None: as they are stored.

    Raises:
        UserError: The job's tokenizer, or the folder that it began from, is damaged or not there.
    """
    spec, architecture = find_model(config.model)
    checkpoint, tokenizer_path = config.checkpoint, config.model.tokenizer_path
    path = checkpoint.initial_load_path if checkpoint.initial_load_in_hf else None
    tokenizer = build_tokenizer(tokenizer_path)
    carried = carried_over(
        None if path is None else Path(path),
        seq_len=config.training.seq_len,
        eos_id=tokenizer.eos_id,
    )
    files = files_to_copy(tokenizer_path, chat_template=config.training.chat_template)
    generation = describe_generation(config, tokenizer=tokenizer, carried=carried)
    if generation is not None:
        files = {name: file for name, file in files.items() if name != GENERATION_CONFIG}
    return HFExport(
        names=Names(spec.hf, architecture, weight_beside),
        dtype=dtype,
        carried=carried,
        adapter=LoRAExport.of(config.lora, base=checkpoint.initial_load_path),
        files=files,
        generation=generation,
        card=describe_card(config).text,
    )


def describe_generation(
    config: Config, *, tokenizer: Tokenizer, carried: Mapping[str, Any]
) -> dict[str, Any] | None:
    """Return the generation_config.json of a model that was trained to end its turn; None: it was
    not, or its template writes no token there."""
    training, path = config.training, config.model.tokenizer_path
    if training.dataset not in SUPERVISED:
        return None
    try:
        template = find_template(training.chat_template, tokenizer=tokenizer, tokenizer_path=path)
        ending = None if template is None else template.end_of_turn()
    except DataError as error:
        logger.warning(
            "Which token ends a turn is not known, add it to eos_token_id of the export's %s: %s",
            GENERATION_CONFIG,
            error,
        )
        return None
    if ending is None:
        return None
    file = tokenizer_file(path)
    found = generation_config(
        None if file is None else file.parent,
        turn_id=tokenizer.special_tokens[ending],
        eos_id=tokenizer.eos_id,
        carried=carried,
    )
    logger.info(
        "The export's %s ends a text at %s, which ends a turn: eos_token_id = %s",
        GENERATION_CONFIG,
        ending,
        found["eos_token_id"],
    )
    return found


def describe_card(config: Config) -> Card:
    """Describe what the model card of a job's exports says."""
    training, lora, base = config.training, config.lora, config.checkpoint.initial_load_path
    data = [f"`{shown(path)}`" for path in training.paths or (training.dataset,)]
    if training.weights:
        shares = zip(data, training.weights, strict=True)
        data = [f"{name} (weight {weight:g})" for name, weight in shares]
    rows: dict[str, object] = {
        "data": ", ".join(data),
        "sequence length": training.seq_len,
        "optimizer": config.optimizer.name,
        "learning rate": config.optimizer.lr,
    }
    if lora.rank:
        rows["LoRA"] = f"rank {lora.rank}, alpha {lora.alpha:g}"
    description = config.job.description
    return Card(
        name=Path(config.job.dump_folder).resolve().name,
        description="" if description == type(config.job)().description else description,
        base=None if base is None else Path(base),
        adapter_alone=lora.export_format == "adapter",
        training=rows,
    )


def chosen_rotation(settings: ModelConfig) -> set[str]:
    """Return which sizes of the rotation a job sets itself: it may start from other ones."""
    chosen = {
        "rope_theta": settings.rope_theta is not None,
        "rope_scaling": settings.rope_scaling.type != "flavor",
    }
    return {name for name, is_set in chosen.items() if is_set}
