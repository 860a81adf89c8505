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

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.checkpoint.storage import STATE
from torchtitan.data.settings import SUPERVISED, TrainingConfig
from torchtitan.data.tokenizer import Tokenizer, build_tokenizer
from torchtitan.finetune.chat import CHAT_TEMPLATE, MORE_TEMPLATES, find_template
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.hf.config import TOKEN_IDS, find_carried
from torchtitan.hf.export import HFExport
from torchtitan.hf.names import (
    CARD,
    CONFIG,
    GENERATION_CONFIG,
    TOKENIZER,
    Names,
    eos_ids,
    tokenizer_file,
)
from torchtitan.hf.peft import AdapterExport
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)
COPIED = ("tokenizer_config.json", "special_tokens_map.json", CHAT_TEMPLATE, GENERATION_CONFIG)
"""Files that an export copies from the folder of tokenizer.json."""


def describe_export(
    spec: ModelSpec,
    architecture: DecoderConfig,
    *,
    dtype: torch.dtype | None,
    name: str,
    description: str,
    tokenizer_path: str,
    training: TrainingConfig,
    lora: LoRAConfig,
    checkpoint: CheckpointConfig,
) -> HFExport:
    """Describe the Hugging Face folder of a run's weights, in `dtype`; None as they are stored;
    raise UserError if the tokenizer, or the folder that the run started from, is damaged or
    missing, or PEFT cannot store the adapters."""
    is_fused = len({*spec.hf.names.values()}) < len(spec.hf.names)
    if lora.export_format == "adapter" and is_fused:  # PEFT's A is one for all rows of a tensor
        rule = f'must be "merged" for {spec.hf.architecture}, whose tensors fuse several matrices'
        raise ConfigError.at("lora.export_format", f'{rule}, got "adapter"')
    base = None if checkpoint.initial_load_path is None else Path(checkpoint.initial_load_path)
    tokenizer, file = build_tokenizer(tokenizer_path), tokenizer_file(tokenizer_path)
    carried = find_carried(
        base if checkpoint.initial_load_in_hf else None,
        seq_len=training.seq_len,
        eos_id=tokenizer.eos_id,
    )
    files: dict[str, Path] = {}
    if file is None:
        logger.info("The export has no tokenizer: %s has no tokenizer.json", tokenizer_path)
    else:
        files = {name: file.with_name(name) for name in COPIED if file.with_name(name).is_file()}
        files[TOKENIZER] = file
        for more in file.with_name(MORE_TEMPLATES).glob("*.jinja"):
            if training.chat_template is None:
                files[f"{MORE_TEMPLATES}/{more.name}"] = more
    if training.chat_template is not None:  # transformers prefers it to tokenizer_config.json
        files[CHAT_TEMPLATE] = Path(training.chat_template).expanduser()
    generation = None
    if training.dataset in SUPERVISED:
        generation = describe_generation(
            training.chat_template,
            tokenizer=tokenizer,
            tokenizer_path=tokenizer_path,
            file=files.get(GENERATION_CONFIG),
            carried=carried,
        )
    library = "peft" if lora.export_format == "adapter" else "transformers"
    return HFExport(
        names=Names(spec.hf, architecture),
        dtype=dtype,
        carried=carried,
        adapter=AdapterExport.from_settings(lora, base=checkpoint.initial_load_path),
        files=files,
        generation=generation,
        card=partial(write_card, name=name, description=description, base=base, library=library),
    )


def describe_generation(
    chat_template: str | None,
    *,
    tokenizer: Tokenizer,
    tokenizer_path: str,
    file: Path | None,
    carried: Mapping[str, Any],
) -> dict[str, Any] | None:
    """Return the generation_config.json of a model that was trained to end its turn.

    The first end token ends a turn; then follow the end tokens of the tokenizer, of the base's
    generation_config.json `file`, and of its config.json, `carried`. None if the template writes
    no token at the end of a turn.
    """
    try:
        template = find_template(chat_template, tokenizer=tokenizer, tokenizer_path=tokenizer_path)
        ending = None if template is None else template.end_of_turn()
    except DataError as error:
        text = "Add the token that ends a turn to eos_token_id in %s of the export: %s"
        logger.warning(text, GENERATION_CONFIG, error)
        return None
    if ending is None:
        return None
    config = StoredJSON(Path(CONFIG), carried)
    ids = {key: carried[key] for key in TOKEN_IDS if carried[key] is not None}
    content = StoredJSON(config.path, ids) if file is None else read_json(file)
    turn_id = tokenizer.special_tokens[ending]
    ends = (eos_ids(content) | eos_ids(config) | {tokenizer.eos_id}) - {turn_id}
    # with this key transformers may derive the file from config.json again
    kept = {key: value for key, value in content.items() if key != "_from_model_config"}
    return {**kept, "eos_token_id": [turn_id, *sorted(ends)]}


def write_card(
    checkpoint: Path, *, name: str, description: str, base: Path | None, library: str
) -> str:
    """Return the model card of a checkpoint's export. It names no absolute path.

    `library` loads the export: transformers or peft. The license of `base`, the weights that the
    run started from, is copied, never guessed.
    """
    state = read_json(checkpoint / "train_state" / STATE)
    base_id = None if base is None else find_hub_id(base)
    license = None if base is None else read_license(base)
    head = ModelCardData(
        library_name=library,
        pipeline_tag="text-generation",
        base_model=base_id,
        license=license,
        tags=["torchtitan"],
    )
    origin = "random weights" if base is None else base_id or base.name
    missing = "a purpose" if license else "a license and a purpose"
    return (
        f"---\n{head.to_yaml()}\n---\n\n# {name}, step {state['step']}\n\n"
        + (f"{description}\n\n" if description else "")
        + f"Trained from {origin} on {state['tokens_seen']:,} tokens.\n\n"
        f"Add {missing} before you publish this model.\n"
    )


def read_license(folder: Path) -> str | None:
    """Return the license that the card of a folder names."""
    try:
        license = ModelCard.load(folder / CARD).data.license
    except (FileNotFoundError, ValueError, yaml.YAMLError):  # no card, or a damaged one
        return None
    is_name = isinstance(license, str) and re.fullmatch(r"[\w.:+-]+", license)
    return license if is_name else None


def find_hub_id(path: Path) -> str | None:
    """Return the name on the Hub of a folder in the download cache, None for other folders."""
    match = re.search(r"models--([^/]+?)--([^/]+)/snapshots/", path.absolute().as_posix() + "/")
    return f"{match[1]}/{match[2]}" if match else None
