"""The files beside the weights in a Hugging Face folder: tokenizer, chat template, token ids."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.hf.config import CARRIED, read_config
from torchtitan.hf.names import CONFIG

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
GENERATION_CONFIG = "generation_config.json"
BESIDE_TOKENIZER = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
)


def tokenizer_file(tokenizer_path: str) -> Path | None:
    """Return the tokenizer.json that a job names; None: its tokenizer is of another kind."""
    path = Path(tokenizer_path).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def files_to_copy(tokenizer_path: str, *, chat_template: str | None) -> Mapping[str, Path]:
    """Return the files of a job's tokenizer, and the chat template that it trained with."""
    files: dict[str, Path] = {}
    file = tokenizer_file(tokenizer_path)
    if file is None:
        logger.info("The export has no tokenizer: %s is none of Hugging Face", tokenizer_path)
    else:
        beside = {name: file.with_name(name) for name in BESIDE_TOKENIZER}
        files = {TOKENIZER: file, **{n: place for n, place in beside.items() if place.is_file()}}
    if chat_template is not None:  # transformers reads this file first
        files[CHAT_TEMPLATE] = Path(chat_template).expanduser()
    return files


def warn_of_other_tokenizer(tokenizer_path: str, *, origin: Path) -> None:
    """Warn where the folder that a run begins from has another tokenizer than the job: ids that
    mean other text train without an error."""
    theirs, ours = origin / TOKENIZER, tokenizer_file(tokenizer_path)
    if Path(tokenizer_path).expanduser().resolve().is_relative_to(origin.resolve()):
        return  # the same one, though it may be in another format
    if theirs.is_file() and (ours is None or ours.read_bytes() != theirs.read_bytes()):
        logger.warning(
            "%s is not the tokenizer of this job, %s, whose ids may mean other text to these "
            'weights; to use it write model.tokenizer_path = "%s"',
            theirs,
            tokenizer_path,
            origin,
        )


def carried_over(origin: Path | None, *, seq_len: int, eos_id: int) -> dict[str, Any]:
    """Return the keys of config.json beside the sizes: as in the folder that the run began from,
    else what the job knows."""
    carried: dict[str, Any] = dict.fromkeys(CARRIED)
    carried |= {"max_position_embeddings": seq_len, "eos_token_id": eos_id}
    if origin is None:
        return carried
    if not (origin / CONFIG).is_file():
        logger.warning("%s is gone: its token ids and context length are not known", origin)
        return carried
    carried |= {key: value for key, value in read_config(origin).items() if key in CARRIED}
    carried["max_position_embeddings"] = max(seq_len, carried["max_position_embeddings"])
    return carried


def stop_ids(folder: Path) -> frozenset[int]:
    """Return the tokens that end a text by a folder's generation_config.json, if it has one."""
    file = folder / GENERATION_CONFIG
    return end_tokens(read_json(file)) if file.is_file() else frozenset()


def generation_config(
    folder: Path | None, *, turn_id: int, eos_id: int, carried: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the generation_config.json of a model that ends its turn: that of the tokenizer's
    folder, or one made of what config.json carries. A text ends at the token that ends a turn
    first, then at those of the base and of the tokenizer."""
    file = None if folder is None else folder / GENERATION_CONFIG
    about = StoredJSON(Path(CONFIG), carried)
    if file is not None and file.is_file():
        content = read_json(file)
    else:
        ids = ("bos_token_id", "pad_token_id")
        content = StoredJSON(
            about.path, {key: carried[key] for key in ids if carried[key] is not None}
        )
    ends = end_tokens(content) | end_tokens(about) | {eos_id}
    # made from config.json, transformers may make it so once more: there is no turn in that
    kept = {key: value for key, value in content.items() if key != "_from_model_config"}
    return {**kept, "eos_token_id": [turn_id, *sorted(ends - {turn_id})]}


def end_tokens(content: StoredJSON) -> frozenset[int]:
    """Return the ids under eos_token_id: one, several, or none where it is null or not there."""
    given = content.get("eos_token_id")
    ids = given if isinstance(given, list) else [] if given is None else [given]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{content.path} is damaged: eos_token_id must be a number or a list of numbers, got "
            f"{str(given)[:60]!r}; get it again"
        )
    return frozenset(ids)
