"""How a step runs through the model: the protocol that the loop calls, and the plain version.

The other version is a pipeline (`pipeline/execution.py`). Either takes the accumulation steps of
one optimizer step and leaves summed gradients, so the loop does not know which one it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from torchtitan.models.contract import LanguageModel
from torchtitan.parallel.batch import Batch
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
