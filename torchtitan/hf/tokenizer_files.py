"""Tokenizer, chat template and generation settings in a Hugging Face folder."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torchtitan.base.errors import CheckpointError, DataError
from torchtitan.base.stored_json import StoredJSON, read_json
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.hf.names import CONFIG, GENERATION_CONFIG

logger = logging.getLogger(__name__)
TOKENIZER = "tokenizer.json"
CHAT_TEMPLATE = "chat_template.jinja"
COPIED = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    CHAT_TEMPLATE,
    GENERATION_CONFIG,
)
"""Files that an export copies from the folder of tokenizer.json."""


def tokenizer_file(tokenizer_path: str) -> Path | None:
    """Return the tokenizer.json at a path, None if the tokenizer has another format."""
    path = Path(tokenizer_path).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


def files_to_copy(tokenizer_path: str, *, chat_template: str | None) -> dict[str, Path]:
    """Return a job's tokenizer files by name, with the chat template that it trained with."""
    files: dict[str, Path] = {}
    file = tokenizer_file(tokenizer_path)
    if file is None:
        logger.info("The export has no tokenizer: %s has no tokenizer.json", tokenizer_path)
    else:
        copied = {name: file.with_name(name) for name in COPIED}
        files = {TOKENIZER: file, **{name: one for name, one in copied.items() if one.is_file()}}
    if chat_template is not None:  # transformers prefers this file to tokenizer_config.json
        files[CHAT_TEMPLATE] = Path(chat_template).expanduser()
    return files


def warn_of_other_tokenizer(tokenizer_path: str, *, base: Path) -> None:
    """Warn if an id has another text in the base model's tokenizer than in the job's.

    Token ids with other meanings train without an error. Ids that only one of them has are not
    compared: a vocabulary may have grown.
    """
    base_file, path = base / TOKENIZER, Path(tokenizer_path).expanduser()
    if not base_file.is_file() or path.resolve().is_relative_to(base.resolve()):
        return
    file = tokenizer_file(tokenizer_path)
    if file is not None and file.read_bytes() == base_file.read_bytes():
        return
    try:
        theirs, ours = build_tokenizer(str(base_file)), build_tokenizer(tokenizer_path)
    except DataError as error:
        logger.warning("%s is not compared with %s: %s", tokenizer_path, base_file, error)
        return
    # twice: some decoders remove the space that a text begins with
    ids = range(min(theirs.vocab_size, ours.vocab_size))
    texts = {i: (theirs.decode([i, i]), ours.decode([i, i])) for i in ids}
    differ = [i for i, (left, right) in texts.items() if left and right and left != right]
    if differ:
        logger.warning(
            "model.tokenizer_path %s has other texts than %s for %d ids, e.g. %d",
            tokenizer_path,
            base_file,
            len(differ),
            differ[0],
        )


def read_stop_ids(folder: Path) -> frozenset[int]:
    """Return the end tokens in a folder's generation_config.json; none if it has no such file."""
    file = folder / GENERATION_CONFIG
    return eos_ids(read_json(file)) if file.is_file() else frozenset()


def eos_ids(content: StoredJSON) -> frozenset[int]:
    """Return the ids under eos_token_id: an id, a list, or null.

    Raises:
        CheckpointError: The value is something else.
    """
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{content.path} is damaged: eos_token_id must be an id or a list of ids, got "
            f"{str(value)[:60]!r}"
        )
    return frozenset(ids)


def build_generation_config(
    folder: Path | None, *, turn_id: int, eos_id: int, carried: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the generation_config.json of a model that was trained to end its turn.

    Args:
        folder: Folder of the tokenizer, whose generation_config.json is extended.
        turn_id: Token that ends a turn: the first of the end tokens.
        eos_id: End token of the tokenizer.
        carried: Keys of config.json, whose end tokens are kept.
    """
    file = None if folder is None else folder / GENERATION_CONFIG
    config = StoredJSON(Path(CONFIG), carried)
    if file is not None and file.is_file():
        content = read_json(file)
    else:
        ids = ("bos_token_id", "pad_token_id")
        content = StoredJSON(config.path, {k: carried[k] for k in ids if carried[k] is not None})
    ends = eos_ids(content) | eos_ids(config) | {eos_id}
    # with this key transformers may derive the file from config.json again
    kept = {key: value for key, value in content.items() if key != "_from_model_config"}
    return {**kept, "eos_token_id": [turn_id, *sorted(ends - {turn_id})]}
