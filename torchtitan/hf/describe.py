"""Describe the Hugging Face folder of a run, from its settings."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import DataError
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.data.settings import SUPERVISED, TrainingConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.chat import find_template
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.hf.card import Card, without_home
from torchtitan.hf.config import find_carried
from torchtitan.hf.export import HFExport
from torchtitan.hf.names import GENERATION_CONFIG, Names
from torchtitan.hf.peft import AdapterExport
from torchtitan.hf.tokenizer_files import (
    build_generation_config,
    files_to_copy,
    tokenizer_file,
)
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.optim.settings import OptimizerConfig

logger = logging.getLogger(__name__)


def describe_export(
    spec: ModelSpec,
    architecture: DecoderConfig,
    *,
    dtype: torch.dtype | None,
    name: str,
    description: str,
    tokenizer_path: str,
    training: TrainingConfig,
    optimizer: OptimizerConfig,
    lora: LoRAConfig,
    checkpoint: CheckpointConfig,
) -> HFExport:
    """Describe the Hugging Face folder of a run's weights.

    Args:
        spec: Family of the model.
        architecture: Sizes of the model.
        dtype: Dtype of the weights. None keeps the stored one.
        name: Name of the run.
        description: Description of the run, "" for none.
        tokenizer_path: The run's model.tokenizer_path.
        training: The run's [training].
        optimizer: The run's [optimizer].
        lora: The run's [lora].
        checkpoint: The run's [checkpoint].

    Raises:
        UserError: The tokenizer, or the folder that the run started from, is damaged or missing.
    """
    initial, tokenizer = checkpoint.initial_load_path, build_tokenizer(tokenizer_path)
    carried = find_carried(
        Path(initial) if initial is not None and checkpoint.initial_load_in_hf else None,
        format=spec.hf,
        seq_len=training.seq_len,
        eos_id=tokenizer.eos_id,
    )
    files = files_to_copy(tokenizer_path, chat_template=training.chat_template)
    generation = describe_generation(
        training, tokenizer=tokenizer, tokenizer_path=tokenizer_path, carried=carried
    )
    if generation is not None:
        files = {name: file for name, file in files.items() if name != GENERATION_CONFIG}
    card = Card(
        name=name,
        description=description,
        base=None if initial is None else Path(initial),
        adapter_only=lora.export_format == "adapter",
        settings=describe_training(training, optimizer=optimizer, lora=lora),
    )
    return HFExport(
        names=Names(spec.hf, architecture),
        dtype=dtype,
        carried=carried,
        adapter=AdapterExport.from_settings(lora, base=initial),
        files=files,
        generation=generation,
        card=card.text,
    )


def describe_generation(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    carried: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the generation_config.json of a model that was trained to end its turn.

    None if it was not, or if its template writes no token there.
    """
    if training.dataset not in SUPERVISED:
        return None
    template_path = training.chat_template
    try:
        template = find_template(template_path, tokenizer=tokenizer, tokenizer_path=tokenizer_path)
        ending = None if template is None else template.end_of_turn()
    except DataError as error:
        logger.warning(
            "Which token ends a turn is unknown, add it to eos_token_id of the export's %s: %s",
            GENERATION_CONFIG,
            error,
        )
        return None
    if ending is None:
        return None
    file = tokenizer_file(tokenizer_path)
    return build_generation_config(
        None if file is None else file.parent,
        turn_id=tokenizer.special_tokens[ending],
        eos_id=tokenizer.eos_id,
        carried=carried,
    )


def describe_training(
    training: TrainingConfig, *, optimizer: OptimizerConfig, lora: LoRAConfig
) -> dict[str, object]:
    """Return the rows of the model card's table."""
    data = [f"`{without_home(path)}`" for path in training.paths or (training.dataset,)]
    if training.weights:
        shares = zip(data, training.weights, strict=True)
        data = [f"{name} (weight {weight:g})" for name, weight in shares]
    rows: dict[str, object] = {
        "data": ", ".join(data),
        "sequence length": training.seq_len,
        "optimizer": optimizer.name,
        "learning rate": optimizer.lr,
    }
    if lora.rank:
        rows["LoRA"] = f"rank {lora.rank}, alpha {lora.alpha:g}"
    return rows
