"""What a rank trains on at once: its part of each sequence of a batch.

Shapes: B sequences, S tokens of each on this rank.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtitan.models.documents import Documents


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Tokens, what they shall predict, and where they stand."""

    tokens: Tensor
    """int64 (B, S)."""
    labels: Tensor
    """int64 (B, S)."""
    positions: Tensor
    """int64, (S) where all sequences have the same, else (B, S)."""
    documents: Documents | None = None
    """Of the whole sequences, for attention inside them; None: over all of a sequence."""

    def to(self, device: torch.device) -> Batch:
        """Return it on a device, without waiting where the host's memory is page-locked."""
        tensors = {
            name: getattr(self, name).to(device, non_blocking=True)
            for name in ("tokens", "labels", "positions")
        }
        return replace(self, **tensors)

    def split(self, size: int) -> list[Batch]:
        """Return parts of `size` sequences each."""
        return [self._rows(slice(i, i + size)) for i in range(0, len(self.tokens), size)]

    def _rows(self, rows: slice) -> Batch:
        return Batch(
            tokens=self.tokens[rows],
            labels=self.labels[rows],
            positions=self.positions if self.positions.ndim == 1 else self.positions[rows],
            documents=None if self.documents is None else self.documents[rows],
        )
