"""The model card of an export: README.md with a head in YAML, as Hugging Face's Hub reads it
(https://huggingface.co/docs/hub/model-cards), which shows by `library_name` how a model is loaded.

Nothing in it is guessed: the license is the one that the card of the base names, and the base's
name on the Hub is known where the base lies in the cache of downloads.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torchtitan.base.files import read_json
from torchtitan.base.urls import hide_credentials
from torchtitan.checkpoint.storage import STATE

CARD = "README.md"
_LICENSE = re.compile(r"(license(?:_name|_link)?):\s+(['\"]?)([\w.:/+-]+)\2\s*")
_IN_CACHE = re.compile(r"models--([^/]+?)--([^/]+)/snapshots/")


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the card of a job's exports says at any step."""

    name: str
    description: str
    base: Path | None
    """The weights that the run began from."""
    adapter_alone: bool
    training: Mapping[str, object]
    """Rows of the table of settings."""

    def text(self, step: Path) -> str:
        """Return the card of a step's export."""
        state = read_json(step / "train_state" / STATE)
        base_id = None if self.base is None else find_hub_id(self.base)
        license = {} if self.base is None else find_license(self.base)
        head = {
            "library_name": "peft" if self.adapter_alone else "transformers",
            "pipeline_tag": "text-generation",
            **({} if base_id is None else {"base_model": base_id}),
            **license,
            "tags": ["torchtitan"],
        }
        table = {
            "base": "none" if self.base is None else base_id or shown(str(self.base)),
            "steps": state["step"],
            "tokens": f"{state['tokens_seen']:,}",
            **self.training,
        }
        due = "a purpose" if license else "a license and a purpose"
        return "\n".join(
            [
                "---",
                *(f"{key}: {json.dumps(value)}" for key, value in head.items()),
                f"---\n\n# {self.name}, step {state['step']}\n",
                *([f"{self.description}\n"] if self.description else []),
                f"Name {due} before you publish it.\n\n| | |\n|---|---|",
                *(f"| {key} | {value} |" for key, value in table.items()),
                "",
            ]
        )


def find_license(folder: Path) -> dict[str, str]:
    """Return what the card in a folder says of its license, as far as it says it in plain names."""
    file = folder / CARD
    text = file.read_text(encoding="utf-8", errors="replace") if file.is_file() else ""
    head = re.match(r"---\s*\n(.*?\n)---", text, flags=re.DOTALL)
    lines = head[1].splitlines() if head else []
    return {match[1]: match[3] for line in lines if (match := _LICENSE.fullmatch(line))}


def find_hub_id(path: Path) -> str | None:
    """Return the name on the Hub of a folder in the cache of downloads; None: it is not known."""
    found = _IN_CACHE.search(path.absolute().as_posix() + "/")
    return f"{found[1]}/{found[2]}" if found else None


def shown(path: str) -> str:
    """Return a path as a card names it: of an absolute one the last name, and no credentials."""
    return Path(path).name if path.startswith(("/", "~")) else hide_credentials(path)
