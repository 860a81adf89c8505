"""Validation: the loss on data that are not trained on, without any effect on training.

Each validation is a forward pass over the same samples: their summed loss divided by the number of
their labels, over all ranks, which is the same figure in any layout. The data have their own
loader, which restarts each time and has no state to save. No gradient is computed, no random number
is drawn and no parameter changes.

The data are read once, each sample exactly once (`PadToBatch`). Their number is seldom a multiple
of the batch over all ranks. To drop samples, or to count some twice, would make the mean depend on
the number of ranks. So samples without labels fill the last batch: they add nothing to the loss,
and every rank takes part in every batch.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from torchtitan.base.errors import DataError, NonFiniteError
from torchtitan.base.log import plural
from torchtitan.data.dataset import PadToBatch, build_samples
from torchtitan.data.loader import Loader, MapSamples
from torchtitan.data.settings import DataLoaderConfig, TrainingConfig, ValidationConfig
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.ranks import (
    OncePerMachine,
    check_data_alike,
    gather,
    set_timeout,
    tighten_timeout,
)
from torchtitan.mesh.settings import CommConfig
from torchtitan.mesh.stop import WaitInterrupted
from torchtitan.metrics.rows import Row
from torchtitan.models.interface import ModelParts
from torchtitan.optim.loss import HasFigures, count_valid
from torchtitan.parallel.context.shard import SequenceShard
from torchtitan.parallel.execution import Batch, Execution
from torchtitan.parallel.fsdp import free_gathered

logger = logging.getLogger(__name__)
LARGEST_EXPONENT = 700.0  # exp of a larger number overflows
BATCHES_BETWEEN_VOTES = 8
SEED = 0  # not the run's: runs with other seeds are validated on the same samples
KEYS: Collection[str] = ("dataset", "dataset_path", "seq_len")
"""Settings of the data in [validation]."""


def validation_source(training: TrainingConfig, validation: ValidationConfig) -> TrainingConfig:
    """Return [training] with the data of [validation], read once."""
    source = replace(
        training,
        local_batch_size=validation.local_batch_size or training.local_batch_size,
        seq_len=validation.seq_len or training.seq_len,
        num_epochs=1,
    )
    if validation.holdout_fraction is not None:
        return source
    return replace(
        source,
        dataset=validation.dataset or training.dataset,
        dataset_options=validation.dataset_options
        if validation.dataset
        else training.dataset_options,
        dataset_path=validation.dataset_path,
        dataset_weights=(),
    )


def build_validator(
    validation: ValidationConfig,
    *,
    training: TrainingConfig,
    tokenizer_path: str,
    samples_per_step: int,
    comm: CommConfig,
    before_saves: bool,
    execution: Execution,
    shard: SequenceShard,
    model: ModelParts,
    mesh: Mesh,
    device: torch.device,
    loss: HasFigures | None = None,
) -> Validator:
    """Build what validates a run, and log how much it reads.

    Keys of [training] hold where [validation] has none. A step of training reads
    `samples_per_step`. `before_saves` validates before each save too. Raises DataError if data are
    missing, empty, damaged, too short, or differ between ranks.
    """
    source, holdout = validation_source(training, validation), validation.holdout_fraction
    samples = build_samples(
        source,
        tokenizer=build_tokenizer(tokenizer_path),
        tokenizer_path=tokenizer_path,
        seed=SEED,
        holdout_fraction=holdout,
        held_out=True,
        keys_of_validation=KEYS if holdout is None else ("holdout_fraction", "seq_len"),
        once=OncePerMachine(),
    )
    check_data_alike(samples.fingerprint)
    batches = PadToBatch(
        samples,
        batch=source.local_batch_size * mesh.dims.dp,
        limit=None if validation.steps == -1 else validation.steps * samples_per_step,
    )
    logger.info(
        f"Validation on {plural(batches.num_drawn, 'sample')} of "
        f"{plural(source.seq_len, 'token')} in {plural(batches.num_batches, 'batch')}, after step "
        f"1, every {plural(validation.freq, 'step')}, and after the last step"
    )
    loader = load_once(
        batches, local_batch_size=source.local_batch_size, mesh=mesh, settings=validation.dataloader
    )
    mask, reset = source.attn_mask_type, source.reset_positions
    parts = [batches.fingerprint, batches.num_drawn, mask, reset]
    return Validator(
        samples=samples,
        loss=loss,
        loader=loader,
        execution=execution,
        shard=shard,
        model=model,
        mesh=mesh,
        device=device,
        data=hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16],
        freq=validation.freq,
        before_saves=before_saves,
        comm=comm,
        reports_perplexity=training.loss == "cross_entropy",
    )


def load_once(
    batches: PadToBatch,
    *,
    local_batch_size: int,
    mesh: Mesh,
    settings: DataLoaderConfig | None = None,
) -> Loader:
    """Build this rank's share of samples that are each read once."""
    return Loader(
        batches,
        local_batch_size=local_batch_size,
        accumulation=1,
        dp_rank=mesh.dp_rank,
        dp_degree=mesh.dims.dp,
        settings=settings or DataLoaderConfig(),
    )


def perplexity_of(loss: float) -> float:
    """Return the perplexity of a loss per token, clamped before it overflows."""
    return math.exp(min(loss, LARGEST_EXPONENT))


@dataclass(kw_only=True)
class Validator:
    """Computes the validation loss of the current weights."""

    samples: MapSamples
    """All samples, before any is added to fill a batch."""
    loader: Loader
    execution: Execution
    shard: SequenceShard
    model: ModelParts
    mesh: Mesh
    device: torch.device
    data: str
    """Fingerprint of the data. Losses of runs with other fingerprints cannot be compared."""
    freq: int
    """Steps between validations."""
    before_saves: bool
    """Validate before each save too."""
    comm: CommConfig
    """Timeouts. The first validation of a start may compile, so init_timeout_seconds holds."""
    reports_perplexity: bool = True
    """Whether the loss is cross-entropy."""
    loss: HasFigures | None = None
    """Figures of a loss of pairs."""
    has_run: bool = False

    def is_due(self, step: int, *, last: bool, saves: bool) -> bool:
        """Return whether to validate after a step that is the `last` one or is saved."""
        return last or step == 1 or step % self.freq == 0 or (saves and self.before_saves)

    def measure(self, step: int, *, is_stopped: Callable[[], bool] = lambda: False) -> Row:
        """Return the figures after `step`, the same on all ranks. Collective.

        `is_stopped` is asked every few batches whether the run stops, also a collective.

        Raises:
            WaitInterrupted: The run stops, or its only rank was asked to while it waited for data.
            DataError: The data cannot be read or have no labels.
            NonFiniteError: The loss is not finite.
        """
        started = time.perf_counter()
        if not self.has_run:
            set_timeout(self.comm.init_timeout_seconds, groups=self.mesh.groups())
        if self.loss is not None:
            self.loss.begin()
        batches = self._batches(is_stopped)
        figures = evaluate(batches, model=self.model, execution=self.execution, device=self.device)
        loss_sums, counts = gather(figures).unbind(1)
        total, count = loss_sums.sum().item(), counts.sum().item()
        if not self.has_run:
            tighten_timeout(self.comm.train_timeout_seconds, groups=self.mesh.groups())
            self.has_run = True
        if not count:
            raise DataError(
                "the validation data have no labels; see validation.dataset, "
                "validation.dataset_path and validation.seq_len"
            )
        loss = total / count
        if not math.isfinite(loss):
            raise NonFiniteError(
                f"step {step} must have a finite validation loss, got {loss}; resume from "
                f"an earlier checkpoint with checkpoint.mode = 'continue' and a lower optimizer.lr"
            )
        row: Row = {"validation_loss": loss}
        if self.reports_perplexity:
            row["validation_perplexity"] = perplexity_of(loss)
        if self.loss is not None:
            figures_of_loss = self.loss.figures().items()
            row |= {f"validation_{name}": value.item() for name, value in figures_of_loss}
        return row | {"validation_time_s": time.perf_counter() - started}

    def _batches(self, is_stopped: Callable[[], bool]) -> Iterator[Batch]:
        self.loader.rewind()
        for number, [samples] in enumerate(self.loader, start=1):
            if number > 1 and number % BATCHES_BETWEEN_VOTES == 1 and is_stopped():
                raise WaitInterrupted
            yield self.shard.take(samples).to(self.device)
        self.loader.close()

    def limit_waits(self, waiting: Callable[[], AbstractContextManager[None]]) -> None:
        """Limit waits for data with `waiting`; see `Loader`."""
        self.loader.waiting = waiting

    def close(self) -> None:
        """End the loader's workers."""
        self.loader.close()


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


def evaluate_once(
    samples: MapSamples,
    *,
    local_batch_size: int,
    model: ModelParts,
    execution: Execution,
    shard: SequenceShard,
    mesh: Mesh,
    device: torch.device,
) -> None:
    """Compute the loss of each sample once, without gradients. Collective."""
    padded = PadToBatch(samples, batch=local_batch_size * mesh.dims.dp)
    loader = load_once(padded, local_batch_size=local_batch_size, mesh=mesh)
    batches = (shard.take(batch).to(device) for [batch] in loader)
    evaluate(batches, model=model, execution=execution, device=device)
    loader.close()


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
