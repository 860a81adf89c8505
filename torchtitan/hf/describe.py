"""Describe the Hugging Face folder of a run, from its settings."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import yaml
from huggingface_hub import ModelCard, ModelCardData

from torchtitan.base.errors import DataError
from torchtitan.base.stored_json import StoredJSON, read_json
from torchtitan.base.urls import hide_credentials
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import STATE
from torchtitan.data.settings import SUPERVISED, TrainingConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.chat import find_template
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.hf.config import find_carried
from torchtitan.hf.export import HFExport
from torchtitan.hf.names import CARD, CONFIG, GENERATION_CONFIG, Names
from torchtitan.hf.peft import AdapterExport
from torchtitan.hf.tokenizer_files import TOKENIZER, eos_ids, tokenizer_file
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.optim.settings import OptimizerConfig

logger = logging.getLogger(__name__)
CHAT_TEMPLATE = "chat_template.jinja"
COPIED = ("tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE, GENERATION_CONFIG)
"""Files that an export copies from the folder of tokenizer.json."""
LICENSE_KEYS = ("license", "license_name", "license_link")


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
    base = None if checkpoint.initial_load_path is None else Path(checkpoint.initial_load_path)
    tokenizer = build_tokenizer(tokenizer_path)
    carried = find_carried(
        base if checkpoint.initial_load_in_hf else None,
        seq_len=training.seq_len,
        eos_id=tokenizer.eos_id,
    )
    files = files_to_copy(tokenizer_path, chat_template=training.chat_template)
    generation = describe_generation(
        training, tokenizer=tokenizer, tokenizer_path=tokenizer_path, carried=carried
    )
    if generation is not None:
        files.pop(GENERATION_CONFIG, None)
    return HFExport(
        names=Names(spec.hf, architecture),
        dtype=dtype,
        carried=carried,
        adapter=AdapterExport.from_settings(lora, base=checkpoint.initial_load_path),
        files=files,
        generation=generation,
        card=partial(
            write_card,
            name=name,
            description=description,
            base=base,
            library="peft" if lora.export_format == "adapter" else "transformers",
            settings=describe_training(training, optimizer=optimizer, lora=lora),
        ),
    )


def files_to_copy(tokenizer_path: str, *, chat_template: str | None) -> dict[str, Path]:
    """Return a job's tokenizer files by name, with the chat template that it trained with."""
    files: dict[str, Path] = {}
    file = tokenizer_file(tokenizer_path)
    if file is None:
        logger.info("The export has no tokenizer: %s has no tokenizer.json", tokenizer_path)
    else:
        files = {name: file.with_name(name) for name in COPIED if file.with_name(name).is_file()}
        files[TOKENIZER] = file
    if chat_template is not None:  # transformers prefers this file to tokenizer_config.json
        files[CHAT_TEMPLATE] = Path(chat_template).expanduser()
    return files


def describe_generation(
    training: TrainingConfig,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    carried: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the generation_config.json of a model that was trained to end its turn.

    The first end token ends a turn; then follow the end tokens of the tokenizer, of the file beside
    it, and of `carried`, the base model's config.json. None if the model was not trained on
    turns, or if its template writes no token there.
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
    turn_id, tokenizer_json = tokenizer.special_tokens[ending], tokenizer_file(tokenizer_path)
    config = StoredJSON(Path(CONFIG), carried)
    file = None if tokenizer_json is None else tokenizer_json.with_name(GENERATION_CONFIG)
    if file is not None and file.is_file():
        content = read_json(file)
    else:
        ids = ("bos_token_id", "pad_token_id")
        content = StoredJSON(config.path, {k: carried[k] for k in ids if carried[k] is not None})
    ends = eos_ids(content) | eos_ids(config) | {tokenizer.eos_id}
    # with this key transformers may derive the file from config.json again
    kept = {key: value for key, value in content.items() if key != "_from_model_config"}
    return {**kept, "eos_token_id": [turn_id, *sorted(ends - {turn_id})]}


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


def write_card(
    checkpoint: Path,
    *,
    name: str,
    description: str,
    base: Path | None,
    library: str,
    settings: Mapping[str, object],
) -> str:
    """Return the model card of a checkpoint's export.

    Args:
        checkpoint: The `step-N` folder.
        name: Name of the run.
        description: Description of the run, "" for none.
        base: Weights that the run started from. Their license is copied, never guessed.
        library: What loads the export: transformers or peft.
        settings: Rows of the table of settings.
    """
    state = read_json(checkpoint / "train_state" / STATE)
    base_id = None if base is None else find_hub_id(base)
    license = {} if base is None else read_license(base)
    head = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        base_model=base_id,
        tags=["torchtitan"],
        **license,
    )
    rows = {
        "base": "none" if base is None else base_id or without_home(str(base)),
        "steps": state["step"],
        "tokens": f"{state['tokens_seen']:,}",
        **settings,
    }
    table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
    missing = "a purpose" if license else "a license and a purpose"
    return str(
        ModelCard(
            f"---\n{head.to_yaml()}\n---\n\n# {name}, step {state['step']}\n\n"
            + (f"{description}\n\n" if description else "")
            + f"Add {missing} before you publish this model.\n\n| | |\n|---|---|\n{table}\n"
        )
    )


def read_license(folder: Path) -> dict[str, Any]:
    """Return the license in the card of a folder, as far as it has plain names."""
    try:
        head = ModelCard.load(folder / CARD).data.to_dict()
    except (FileNotFoundError, ValueError, yaml.YAMLError):  # no card, or a damaged one
        return {}
    values = {key: head[key] for key in LICENSE_KEYS if key in head}
    return {k: v for k, v in values.items() if re.fullmatch(r"[\w.:/+-]+", str(v))}


def find_hub_id(path: Path) -> str | None:
    """Return the name on the Hub of a folder in the download cache, None for other folders."""
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", path.absolute().as_posix() + "/")
    return f"{match[1]}/{match[2]}" if match else None


def without_home(path: str) -> str:
    """Return a path for the card: only the last name if it is absolute, and no credentials."""
    return Path(path).name if path.startswith(("/", "~")) else hide_credentials(path)
