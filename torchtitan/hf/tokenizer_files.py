"""Tokenizer and end tokens in a Hugging Face folder."""

from __future__ import annotations

from pathlib import Path

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.hf.names import GENERATION_CONFIG

TOKENIZER = "tokenizer.json"


def tokenizer_file(tokenizer_path: str) -> Path | None:
    """Return the tokenizer.json at a path, None if the tokenizer has another format."""
    path = Path(tokenizer_path).expanduser()
    file = path / TOKENIZER if path.is_dir() else path
    return file if file.suffix == ".json" and file.is_file() else None


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
