"""The model card of an export: README.md with metadata in YAML, as the Hugging Face Hub reads it.

The license is copied from the base model's card, and its name on the Hub is known if it was loaded
from the Hub's download cache. Neither is guessed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import ModelCardData, RepoCard

from torchtitan.base.stored_json import read_json
from torchtitan.base.urls import hide_credentials
from torchtitan.checkpoint.storage import STATE
from torchtitan.hf.names import CARD

LICENSE_KEYS = ("license", "license_name", "license_link")
_PLAIN = re.compile(r"[\w.:/+-]+")
_IN_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")


@dataclass(frozen=True, kw_only=True)
class Card:
    """Contents of the model cards of a run."""

    name: str
    description: str
    base: Path | None
    """Weights that the run started from."""
    adapter_only: bool
    settings: Mapping[str, object]
    """Rows of the table of settings."""

    def text(self, checkpoint: Path) -> str:
        """Return the card of a checkpoint's export."""
        state = read_json(checkpoint / "train_state" / STATE)
        base_id = None if self.base is None else find_hub_id(self.base)
        license: dict[str, Any] = {} if self.base is None else read_license(self.base)
        head = ModelCardData(
            library_name="peft" if self.adapter_only else "transformers",
            pipeline_tag="text-generation",
            base_model=base_id,
            tags=["torchtitan"],
            **license,
        )
        rows = {
            "base": "none" if self.base is None else base_id or without_home(str(self.base)),
            "steps": state["step"],
            "tokens": f"{state['tokens_seen']:,}",
            **self.settings,
        }
        table = "\n".join(f"| {key} | {value} |" for key, value in rows.items())
        missing = "a purpose" if license else "a license and a purpose"
        description = f"{self.description}\n\n" if self.description else ""
        return (
            f"---\n{head.to_yaml()}\n---\n\n# {self.name}, step {state['step']}\n\n{description}"
            f"Add {missing} before you publish this model.\n\n| | |\n|---|---|\n{table}\n"
        )


def read_license(folder: Path) -> dict[str, str]:
    """Return the license in the card of a folder, as far as it has plain names."""
    file = folder / CARD
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    if not text.startswith("---"):
        return {}
    try:
        head = RepoCard(text).data.to_dict()
        values = {key: head.get(key) for key in LICENSE_KEYS}
    except Exception:  # noqa: BLE001 - YAML raises anything; a damaged card states no license
        return {}
    return {k: v for k, v in values.items() if isinstance(v, str) and _PLAIN.fullmatch(v)}


def find_hub_id(path: Path) -> str | None:
    """Return the name on the Hub of a folder in the download cache, None for other folders."""
    found = _IN_CACHE.search(path.absolute().as_posix() + "/")
    return f"{found[1]}/{found[2]}" if found else None


def without_home(path: str) -> str:
    """Return a path for the card: only the last name if it is absolute, and no credentials."""
    return Path(path).name if path.startswith(("/", "~")) else hide_credentials(path)
