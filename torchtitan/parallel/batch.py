"""What a rank trains on at a time: its part of each sequence of a batch.

Shapes: B sequences, S tokens of each on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtitan.models.documents import Documents


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens, their labels, and their positions."""

    tokens: Tensor
    """int64 (B, S)."""
    labels: Tensor
    """int64 (B, S)."""
    positions: Tensor
    """int64, (S) where all sequences have the same, else (B, S)."""
    documents: Documents | None = None
    """Of the whole sequences, for attention inside them; None: over all of a sequence."""
    is_padding: Tensor | None = None
    """Which tokens only fill a sample up, bool (B, S); None: none do."""

    def to(self, device: torch.device) -> Batch:
        """Return it on a device, without waiting for that."""
        names = ("tokens", "labels", "positions")
        padding = None if self.is_padding is None else _send(self.is_padding, device)
        sent = {name: _send(getattr(self, name), device) for name in names}
        return replace(self, is_padding=padding, **sent)

    def split(self, size: int) -> list[Batch]:
        """Return parts of `size` sequences each."""
        return [self._rows(slice(i, i + size)) for i in range(0, len(self.tokens), size)]

    def _rows(self, rows: slice) -> Batch:
        return Batch(
            tokens=self.tokens[rows],
            labels=self.labels[rows],
            positions=self.positions if self.positions.ndim == 1 else self.positions[rows],
            documents=None if self.documents is None else self.documents[rows],
            is_padding=None if self.is_padding is None else self.is_padding[rows],
        )


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # otherwise the copy would wait for the device's other work
    return tensor.to(device, non_blocking=True)
