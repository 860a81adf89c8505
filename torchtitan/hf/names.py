"""Names of files and tensors in Hugging Face folders, and the folder's end tokens.

Hugging Face's tensors differ from our parameters in four ways, which `HFFormat` of a family
describes: names, the row order of some parameters (`checkpoint/rows.py`), experts, which are one
tensor each there and stacked in one parameter here, and fused tensors: the rows of several
parameters here, one after another.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

import torch

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.checkpoint.rows import Heads
from torchtitan.finetune.lora import adapted_weight
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import EACH, HFFormat

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
CARD = "README.md"
TOKENIZER = "tokenizer.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""File names of PEFT."""
Slot = tuple[str, int | None]
"""A parameter and an index along its first dimension, None for the full parameter."""
_LAYER = re.compile(r"\blayers\.([0-9]{1,9})\.")
_NUMBER = re.compile(r"(?<=\.)([0-9]{1,9})(?=\.)")


@dataclass(frozen=True)
class Names:
    """Translates between the parameters of a model and Hugging Face's tensors."""

    format: HFFormat
    architecture: DecoderConfig

    def to_hf(self, name: str) -> str:
        """Return the tensor name of a parameter, with `EACH` in place of an index."""
        translated, layer = self.format.names.get(any_layer(name)), _LAYER.search(name)
        assert translated is not None, f"{self.format.architecture} has no name for {name}"
        return translated if layer is None else translated.replace("*", layer[1])

    def from_hf(self, name: str) -> Slot | None:
        """Return the parameter that a tensor fills, None if it fills no parameter, or several."""
        if parts := self.parts_of(name):
            return (parts[0], None) if len(parts) == 1 else None
        layer = _LAYER.search(name)
        number = _NUMBER.search(name, 0 if layer is None else layer.end())
        if number is None:
            return None
        stacked = self.parts_of(name[: number.start()] + EACH + name[number.end() :])
        return (stacked[0], int(number[1])) if stacked else None

    def parts_of(self, name: str) -> list[str]:
        """Return the parameters whose rows a tensor has, in order; several if it is fused."""
        stored, layer = any_layer(name), _LAYER.search(name)
        parts = [ours for ours, theirs in self.format.names.items() if theirs == stored]
        return parts if layer is None else [part.replace("*", layer[1]) for part in parts]

    def rope_heads(self, name: str) -> Heads | None:
        """Return the heads of a parameter in half-split row order, None for other orders."""
        is_half_split = any_layer(adapted_weight(name)) in self.format.rotary
        sizes = self.architecture
        return (sizes.head_width, sizes.rotary_dim) if is_half_split else None

    def is_extra_layer(self, name: str, *, num_layers: int) -> bool:
        """Return whether a tensor is part of an extra layer after the last, which is not read."""
        layer = _LAYER.search(name)
        is_after = layer is not None and int(layer[1]) >= num_layers
        return bool(self.format.more_layers) and is_after

    def stored_dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the type of a parameter in a file whose weights have type `dtype`."""
        return torch.float32 if any_layer(name) in self.format.float32 else dtype

    def find_mismatch(self, parameters: Collection[str]) -> str | None:
        """Describe parameters without a name and names without a parameter.

        Returns:
            None if they match one to one.
        """
        if not self.format.names:
            return "the family has no Hugging Face format (hf)"
        numbered = {
            name.replace("*", str(layer))
            for name in self.format.names
            for layer in range(self.architecture.num_layers if "*" in name else 1)
        }
        expected = set(filter(self.architecture.has_parameter, numbered))
        problems = {
            f"{self.format.architecture} has no name for": set(parameters) - expected,
            "the model lacks": expected - set(parameters),
        }
        translated = [
            f"{problem} {', '.join(sorted(names)[:4])}{' ...' if len(names) > 4 else ''}"
            for problem, names in problems.items()
            if names
        ]
        return "; ".join(translated) or None


def any_layer(name: str) -> str:
    """Return a name with a star in place of the layer."""
    return _LAYER.sub("layers.*.", name)


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
    """Return the ids under eos_token_id: an id, a list, or null; raise CheckpointError if the value
    is something else."""
    value = content.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(type(i) is int for i in ids):
        raise CheckpointError(
            f"{content.path} is damaged: eos_token_id must be an id or a list of ids, got "
            f"{str(value)[:60]!r}"
        )
    return frozenset(ids)
