"""The execution of a step: the protocol that the loop calls, and its version without a pipeline.

The other version is a pipeline (`pipeline/execution.py`). Both take the batches of one optimizer
step and leave summed gradients, so the loop does not know which one it has.

Shapes: B sequences, S tokens of each sequence on this rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from torchtitan.models.interface import Documents, LanguageModel


class Execution(Protocol):
    """Runs batches through all parts of the model, on all ranks that hold a part."""

    owns_loss: bool
    """Whether this rank computes the loss. Other ranks return 0."""

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Accumulate the gradients of the loss divided by `divisor`, and return the summed loss.

        The result covers this rank's tokens and is a float64 scalar.
        """
        ...

    def evaluate(self, batch: Batch) -> Tensor:
        """Return the summed loss of one batch, like `forward_backward` but without gradients."""
        ...

    def after_update(self) -> None:
        """Update copies of parameters after the optimizer or a checkpoint changed them."""
        ...


class WholeModel:
    """Execution without a pipeline: every rank has all layers."""

    owns_loss = True

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Run the batches in order. Their losses are divided by the same number."""
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
        """Do nothing, because no parameter has a copy."""

    def _run(self, batch: Batch) -> Tensor:
        loss = self._model(batch.tokens, batch.positions, batch.documents, batch.labels)
        assert loss.ndim == 0, "with labels, a model returns their summed loss"
        return loss


def sync_gradients(model: nn.Module, *, last: bool) -> None:
    """Sum gradients over replicas only in the backward of a step's last microbatch.

    Gradients are reduce-scattered in every microbatch, which frees the unsharded gradient.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_all_reduce(last)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """This rank's part of each sequence of a batch."""

    tokens: Tensor
    """int64 (B, S)."""
    labels: Tensor
    """int64 (B, S)."""
    positions: Tensor
    """int64 (S) if all sequences have the same, otherwise (B, S)."""
    documents: Documents | None = None
    """Documents of the full sequences, to attend within them. None: attend to all tokens."""
    token_indices: Tensor | None = None
    """Index of each token in the full sequence, int64 (S) or (B, S). Set with `lengths`."""
    lengths: Tensor | None = None
    """Number of tokens of each full sequence before its padding, int64 (B). None: no padding."""

    def is_text(self) -> Tensor | None:
        """Return whether each token is not padding, bool (B, S). None: all of them."""
        if self.lengths is None or self.token_indices is None:
            return None
        return self.token_indices < self.lengths[:, None]

    def to(self, device: torch.device) -> Batch:
        """Copy the batch to a device without waiting for the copy."""
        names = ("tokens", "labels", "positions", "token_indices", "lengths")
        tensors = {name: tensor for name in names if (tensor := getattr(self, name)) is not None}
        return replace(self, **{name: _send(tensor, device) for name, tensor in tensors.items()})

    def split(self, size: int) -> list[Batch]:
        """Return batches of `size` sequences each."""
        return [self._rows(slice(i, i + size)) for i in range(0, len(self.tokens), size)]

    def _rows(self, rows: slice) -> Batch:
        token_indices = self.token_indices
        return Batch(
            tokens=self.tokens[rows],
            labels=self.labels[rows],
            positions=self.positions if self.positions.ndim == 1 else self.positions[rows],
            documents=None if self.documents is None else self.documents[rows],
            token_indices=token_indices
            if token_indices is None or token_indices.ndim == 1
            else token_indices[rows],
            lengths=None if self.lengths is None else self.lengths[rows],
        )


def _send(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and not tensor.is_pinned():
        tensor = tensor.pin_memory()  # otherwise the copy would block the host
    return tensor.to(device, non_blocking=True)
