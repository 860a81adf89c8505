"""How a step runs through the model: the protocol that the loop calls, and the plain version.

The other version is a pipeline (`pipeline/execution.py`). Either takes the accumulation steps of
one optimizer step and leaves summed gradients, so the loop does not know which one it has.

What a rank trains on at a time: its part of each sequence of a batch.

Shapes: B sequences, S tokens of each on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.models.interface import Documents, LanguageModel
from torchtitan.parallel.fsdp import sync_gradients


class Execution(Protocol):
    """Runs batches through all parts of the model, on all ranks that hold one."""

    owns_loss: bool
    """Whether the loss is computed on this rank; elsewhere it is reported as 0."""

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Accumulate the gradients of the loss divided by `divisor`; return the summed loss.

        The result is a float64 scalar of this rank's tokens.
        """
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the summed loss of one batch, without gradients; else as `forward_backward`."""
        ...

    def after_update(self) -> None:
        """Bring copies of parameters up to date, after the optimizer or a checkpoint changed
        them."""
        ...


class WholeModel:
    """All layers on every rank."""

    owns_loss = True

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Run one batch after the other, the loss of each divided by the same number."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=divisor.device)
        for index, batch in enumerate(batches):
            sync_gradients(self._model, last=index == len(batches) - 1)
            loss = self._run(batch)
            (loss / divisor).backward()
            loss_sum += loss.detach()
        return loss_sum

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Return the summed loss of one batch."""
        return self._run(batch).double()

    def after_update(self) -> None:
        """Do nothing: there are no copies."""

    def _run(self, batch: Batch) -> Tensor:
        loss = self._model(batch.tokens, batch.positions, batch.documents, batch.labels)
        assert loss.ndim == 0, "given labels, a model returns their summed loss"
        return loss


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
    places: Tensor | None = None
    """Of each token in its whole sequence, int64 (S) or (B, S); given with `lengths`."""
    lengths: Tensor | None = None
    """Tokens of each whole sequence before its padding, int64 (B); None: there is no padding."""

    def is_text(self) -> Tensor | None:
        """Return which tokens are not padding, bool (B, S); None: all."""
        if self.lengths is None or self.places is None:
            return None
        return self.places < self.lengths[:, None]

    def to(self, device: torch.device) -> Batch:
        """Return it on a device, without waiting for that."""
        names = ("tokens", "labels", "positions", "places", "lengths")
        given = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **{name: _send(tensor, device) for name, tensor in given.items()})

    def split(self, size: int) -> list[Batch]:
        """Return parts of `size` sequences each."""
        return [self._rows(slice(i, i + size)) for i in range(0, len(self.tokens), size)]

    def _rows(self, rows: slice) -> Batch:
        places = self.places
        return Batch(
            tokens=self.tokens[rows],
            labels=self.labels[rows],
            positions=self.positions if self.positions.ndim == 1 else self.positions[rows],
            documents=None if self.documents is None else self.documents[rows],
            places=places if places is None or places.ndim == 1 else places[rows],
            lengths=None if self.lengths is None else self.lengths[rows],
        )


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # otherwise the copy would wait for the device's other work
    return tensor.to(device, non_blocking=True)
