"""Tensors of a checkpoint, read one at a time and without a process group.

So tools work with a run of any size and layout in the memory of a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.reader import Region, TensorReader
from torchtitan.checkpoint.storage import METADATA


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of a component of a checkpoint by name, except names that start with
    `skip`; empty if the component has none."""

    def __init__(self, checkpoint: Path, component: str, *, skip: tuple[str, ...] = ()) -> None:
        folder = checkpoint / component
        self._reader = TensorReader(folder, None if (folder / METADATA).is_file() else {})
        self.path, self._names = folder, {}
        for name, entry in sorted(self._reader.entries.items()):
            if entry is None:
                raise CheckpointError(f"{folder} must hold only tensors, got '{name}'")
            if not name.startswith(skip):
                self._names[name] = torch.empty(entry.shape, dtype=entry.dtype, device="meta")

    @property
    def empty(self) -> Mapping[str, Tensor]:
        """The tensors without their elements."""
        return self._names

    def __getitem__(self, name: str) -> Tensor:
        tensor = torch.empty_like(self._names[name], device="cpu")
        self._reader.read([Region(name, tensor, [0] * tensor.dim())])
        return tensor

    def __contains__(self, name: object) -> bool:
        return name in self._names

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
