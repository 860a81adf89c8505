"""The same weights under two names: our parameters, and the tensors of Hugging Face's files.

Three things differ, and the model's spec describes them (`HFFormat`): the names, for some
parameters the order of rows (`checkpoint/rows.py`), and experts, which are a tensor each there and
stacked here. Nothing else in the library reads these tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch

from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import EACH, HFFormat

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
"""What PEFT calls the files of an adapter."""
Place = tuple[str, int | None]
"""A parameter of ours, and which entry along its first dimension; None: all of it."""
_LAYER = re.compile(r"\blayers\.([0-9]{1,9})\.")
_NUMBER = re.compile(r"(?<=\.)([0-9]{1,9})(?=\.)")


@dataclass(frozen=True)
class Names:
    """Translates the names of one model."""

    format: HFFormat
    architecture: DecoderConfig
    weight_beside: Callable[[str], str] = lambda name: name
    """The weight whose rows a parameter's are, where that is another one."""

    def theirs(self, ours: str) -> str:
        """Return the tensor that holds a parameter, or with `EACH` in it those that do."""
        theirs = _translated(ours, self.format.names)
        assert theirs is not None, f"{self.format.architecture} has no name for {ours}"
        return theirs

    def ours(self, theirs: str) -> Place | None:
        """Return what a tensor holds; None: we have no such parameter."""
        table = {value: key for key, value in self.format.names.items()}
        if (whole := _translated(theirs, table)) is not None:
            return whole, None
        layer = _LAYER.search(theirs)
        number = _NUMBER.search(theirs, 0 if layer is None else layer.end())
        if number is None:
            return None
        stack = _translated(theirs[: number.start()] + EACH + theirs[number.end() :], table)
        return None if stack is None else (stack, int(number[1]))

    def head_dim(self, ours: str) -> int | None:
        """Return the width of the heads whose rows lie in halves; None: they lie as ours."""
        weight = _starred(self.weight_beside(ours))
        return self.architecture.head_width if weight in self.format.rotary else None

    def is_of_more_layers(self, theirs: str, *, num_layers: int) -> bool:
        """Tell whether a tensor is of a layer behind the last of `num_layers`: it is not read."""
        layer = _LAYER.search(theirs)
        is_behind = layer is not None and int(layer[1]) >= num_layers
        return bool(self.format.more_layers) and is_behind

    def dtype(self, ours: str, *, of_weights: torch.dtype) -> torch.dtype:
        """Return the type that a parameter is stored in, where weights are in another."""
        return torch.float32 if _starred(ours) in self.format.float32 else of_weights

    def find_misnamed(self, ours: Collection[str]) -> str | None:
        """Say which parameters have no name in the files, and which the model lacks.

        None: names and parameters match one to one.
        """
        if not self.format.names:
            return "Hugging Face has no files of the family (no hf)"
        named = {
            name.replace("*", str(layer))
            for name in self.format.names
            for layer in range(self.architecture.num_layers if "*" in name else 1)
        }
        due = set(filter(self.architecture.has_parameter, named))
        wrong = {
            f"the files of a {self.format.architecture} have no name for": set(ours) - due,
            "the model lacks, of what they hold,": due - set(ours),
        }
        said = [
            f"{what} {', '.join(sorted(found)[:4])}{' ...' if len(found) > 4 else ''}"
            for what, found in wrong.items()
            if found
        ]
        return "; ".join(said) or None


def _translated(name: str, table: Mapping[str, str]) -> str | None:
    found, layer = table.get(_starred(name)), _LAYER.search(name)
    return found if found is None or layer is None else found.replace("*", layer[1])


def _starred(name: str) -> str:
    return _LAYER.sub("layers.*.", name)
