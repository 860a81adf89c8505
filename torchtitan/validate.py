"""The loss on data that are not trained on; measuring it changes nothing in the training.

A validation is a forward pass over the same samples each time: their summed loss divided by the
number of their labels, over all ranks, so that it is the same figure in any layout. The data have a
loader of their own, which restarts each time and so has no state to save; no gradient is computed,
no random number drawn, and parameters are left as they were.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor

from torchtitan.base.errors import DataError, NonFiniteError
from torchtitan.data.loader import Loader
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.ranks import gather, set_timeout, tighten_timeout
from torchtitan.metrics.rows import Row
from torchtitan.models.interface import ModelParts
from torchtitan.optim.loss import count_valid
from torchtitan.parallel.context.layout import SequenceShard
from torchtitan.parallel.execution import Batch, Execution
from torchtitan.parallel.fsdp import free_gathered

LARGEST_EXPONENT = 700.0  # exp of more overflows a float


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a loss per token, cut off where it would overflow."""
    return math.exp(min(loss, LARGEST_EXPONENT))


class Validator:
    """Measures the model as it is.

    `data` identifies the validation's data. `before_saves`: validate before each save.
    `tells_perplexity`: the loss is cross-entropy. The first
    validation of a start may compile, so it has `first_timeout_seconds`.
    """

    def __init__(
        self,
        *,
        loader: Loader,
        execution: Execution,
        shard: SequenceShard,
        model: ModelParts,
        mesh: Mesh,
        device: torch.device,
        data: str,
        freq: int,
        before_saves: bool,
        first_timeout_seconds: int,
        timeout_seconds: int,
        tells_perplexity: bool = True,
    ) -> None:
        self.data = data
        self._loader, self._execution, self._shard = loader, execution, shard
        self._model, self._mesh, self._device = model, mesh, device
        self._freq, self._before_saves = freq, before_saves
        self._first_timeout, self._timeout = first_timeout_seconds, timeout_seconds
        self._has_run, self._tells_perplexity = False, tells_perplexity

    def is_due(self, step: int, *, last: bool, saves: bool) -> bool:
        """Return whether to validate after a step that is the `last` one or is saved."""
        return last or step == 1 or step % self._freq == 0 or (saves and self._before_saves)

    def measure(self, step: int) -> Row:
        """Return the validation's figures after `step`, on all ranks alike.

        Raises:
            WaitInterrupted: The only rank was asked to stop while it waited for data.
            DataError: The data cannot be read, or have no labels.
            NonFiniteError: The loss is not finite.
        """
        started = time.perf_counter()
        if not self._has_run:
            set_timeout(self._first_timeout, groups=self._mesh.groups())
        figures = evaluate(
            self._batches(), model=self._model, execution=self._execution, device=self._device
        )
        loss_sums, counts = gather(figures).unbind(1)
        total, count = loss_sums.sum().item(), counts.sum().item()
        if not self._has_run:
            tighten_timeout(self._timeout, groups=self._mesh.groups())
            self._has_run = True
        if not count:
            raise DataError(
                "the validation's data must hold labels, all of their tokens are without; see "
                "validation.dataset, validation.dataset_path and validation.seq_len"
            )
        loss = total / count
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {step} must have a finite validation loss, got {loss}; go on from an "
                f"earlier checkpoint with checkpoint.mode = 'continue' and a lower optimizer.lr"
            )
        row: Row = {"validation_loss": loss}
        if self._tells_perplexity:
            row["validation_perplexity"] = perplexity_of(loss)
        return row | {"validation_time_s": time.perf_counter() - started}

    def _batches(self) -> Iterator[Batch]:
        self._loader.rewind()
        for [samples] in self._loader:
            yield self._shard.take(samples).to(self._device)
        self._loader.close()

    def limit_waits(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Limit waits for data by `waiting`, see `Loader`."""
        self._loader.waiting = waiting

    def close(self) -> None:
        """End the loader's workers."""
        self._loader.close()


def evaluate(
    batches: Iterable[Batch], *, model: ModelParts, execution: Execution, device: torch.device
) -> Tensor:
    """Return this rank's summed loss and the number of its labels, in float64."""
    loss_sum = torch.zeros((), dtype=torch.float64, device=device)
    num_valid = torch.zeros_like(loss_sum)
    with _evaluating(model, device=device):
        for batch in batches:
            loss_sum += execution.evaluate(batch)
            if execution.owns_loss:
                num_valid += count_valid(batch.labels)
    return torch.stack([loss_sum, num_valid])


@contextmanager
def _evaluating(model: ModelParts, *, device: torch.device) -> Iterator[None]:
    modes = [part.training for part in model]
    for part in model:
        part.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for part, mode in zip(model, modes, strict=True):
            part.train(mode)
            free_gathered(part)
