"""The step loop.

It receives finished parts (`assemble/`) and builds nothing. One optimizer step:

    count the valid tokens of the global batch -> forward and backward of each microbatch, its
    summed loss divided by that count -> global gradient norm -> clip -> update, unless the norm
    is not finite

Sums over ranks, never means, so that every split of the batch trains the same model.

The host runs ahead of the device: whether a step's norm was finite is read while the device works
on the next one, or at once where the step is reported or saved.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.transfer import HostCopy, to_device
from torchtitan.checkpoint.manager import CheckpointManager
from torchtitan.checkpoint.state import Progress
from torchtitan.data.loader import Loader, Samples
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.faults import raise_if_nonfinite
from torchtitan.mesh.process_group import gather, tighten_timeout
from torchtitan.mesh.stop import StopRequest, describe
from torchtitan.metrics.meter import Meter
from torchtitan.metrics.sinks import Row, Sink
from torchtitan.metrics.trace import Profiler
from torchtitan.models.parts import ModelParts
from torchtitan.optim.clip import clip_gradients, global_norm
from torchtitan.optim.loss import count_valid
from torchtitan.optim.optimizer import skips_by_itself, take_step
from torchtitan.optim.schedule import Schedule, set_lr
from torchtitan.parallel.context.layout import SequenceShard
from torchtitan.parallel.execution import Execution
from torchtitan.validate import Validator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything the loop holds."""

    device: torch.device
    mesh: Mesh
    model: ModelParts
    execution: Execution
    shard: SequenceShard
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    loader: Loader
    progress: Progress
    checkpoints: CheckpointManager | None
    validator: Validator | None
    meter: Meter
    sinks: Sequence[Sink]
    profiler: Profiler | None
    training: TrainingConfig
    tokens_per_step: int
    log_freq: int
    train_timeout_seconds: int


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """What a step leaves, still on the device."""

    step: int
    loss_sum: Tensor
    """Summed loss of this rank's valid tokens."""
    num_valid: Tensor
    """This rank's valid tokens."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""
    norm_on_host: HostCopy
    """The same, for `_settle`."""
    notes: HostCopy
    """The number of ranks whose save in the background has failed, and `StopRequest.votes`, summed
    over all ranks before the forward pass."""


class Trainer:
    """Takes a run from where it is to its last step."""

    def __init__(
        self,
        run: Run,
        *,
        stop: StopRequest | None = None,
        doing: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`doing` shows, while it is open, what is done instead of training."""
        self.run = run
        self.last_row: Row | None = None
        self._stop = stop or StopRequest()
        self._doing = doing
        # once: walking through all modules takes a millisecond, and the optimizer has these too
        self._parameters = [p for p in run.model.parameters() if p.requires_grad]
        self._unread: StepFigures | None = None
        self._stopped: str | None = None
        self._open = ExitStack()
        parts = [run.checkpoints, run.profiler, *run.sinks, run.loader, run.validator]
        for part in reversed(parts):  # the last one in is closed first
            if part is not None:
                self._open.callback(part.close)

    def train(self, *, on_step: Callable[[int], None] = lambda step: None) -> str | None:
        """Train until `num_steps` or the end of the data; the last step is reported and saved.

        `on_step` is told of each step that is done. Returns why the run was stopped before, on all
        ranks alike, or None.

        Raises:
            NonFiniteError: The loss or the gradient norm is not finite; weights are unchanged.
            CheckpointError: A checkpoint could not be saved.
        """
        run, progress = self.run, self.run.progress
        first_step = progress.step + 1
        finished = self._is_finished()
        run.meter.start_interval()
        with _collecting_garbage_by_hand() as collect:
            while not (finished or self._stopped):
                with run.meter.waiting_for_data():
                    microbatches = next(run.loader)
                progress.step += 1
                figures = self._train_step(microbatches)
                progress.tokens_seen += run.tokens_per_step
                run.meter.count(run.tokens_per_step)
                finished = self._is_finished()
                self._heed(figures.notes)
                if progress.step == first_step:
                    tighten_timeout(run.train_timeout_seconds, groups=run.mesh.groups())
                validates = self._is_validation_due(last=finished)
                logged = progress.step % run.log_freq == 0 or progress.step == 1 or finished
                logged = logged or validates
                if logged or self._is_save_due(last=finished):
                    self._settle()
                if logged:
                    self._report(figures, validates=validates)
                if self._save(last=finished) and not finished:
                    self._stopped = self._stopped or self._ask_all()
                on_step(progress.step)
                if run.profiler is not None:
                    run.profiler.step(progress.step)
                if progress.step % run.training.gc_freq == 0:
                    collect()
            self._settle()
        return None if finished else self._stopped

    def _settle(self) -> None:
        """Raise an error if the last step's norm was not finite and nobody has looked yet."""
        figures, self._unread = self._unread, None
        if figures is not None:
            [norm] = figures.norm_on_host.read()
            raise_if_nonfinite(norm, loss=figures.loss_sum, step=figures.step)

    def _heed(self, notes: HostCopy) -> None:
        """Hear of failed saves and of who wants to stop; it was known before the forward pass."""
        failed_saves, *votes = notes.read()
        # agreed in the step's reduction: one rank that stopped alone would leave the others hanging
        if self.run.checkpoints is not None and failed_saves:
            self.run.checkpoints.wait()
        self._stopped = self._stopped or describe([int(vote) for vote in votes])

    def _is_validation_due(self, *, last: bool) -> bool:
        validator = self.run.validator
        if validator is None or self._stopped is not None:  # whoever must leave saves at once
            return False
        return validator.is_due(
            self.run.progress.step, last=last, saves=self._is_save_due(last=last)
        )

    def _is_save_due(self, *, last: bool) -> bool:
        checkpoints, now = self.run.checkpoints, self._stopped is not None
        return checkpoints is not None and checkpoints.is_due(last=last, now=now)

    def _save(self, *, last: bool) -> bool:
        if self.run.checkpoints is None or not self._is_save_due(last=last):
            return False
        with self.run.meter.paused(), self._doing("saving"):
            return self.run.checkpoints.save_if_due(
                last=last, now=self._stopped is not None, validation_loss=self._validation_loss()
            )

    def _validation_loss(self) -> float | None:
        """Return the validation loss of the present weights, if it was measured."""
        row = self.last_row
        is_present = row is not None and row["step"] == self.run.progress.step
        return row.get("validation_loss") if row is not None and is_present else None

    def _ask_all(self) -> str | None:
        """Ask again after a save: it may have taken long, and the step need not be saved twice."""
        votes = to_device(self._stop.votes(), self.run.device)
        dist.all_reduce(votes)
        return describe(votes.tolist())

    def _is_finished(self) -> bool:
        run = self.run
        if run.loader.exhausted and run.progress.step < run.training.steps:
            logger.info("The data ends after step %d of %d", run.progress.step, run.training.steps)
        return run.loader.exhausted or run.progress.step >= run.training.steps

    def _train_step(self, microbatches: Sequence[Samples]) -> StepFigures:
        run, step = self.run, self.run.progress.step
        set_lr(run.optimizer, run.schedule(step))
        batches = [run.shard.take(samples).to(run.device) for samples in microbatches]
        num_valid = torch.stack([count_valid(batch.labels) for batch in batches]).sum()
        num_valid_global, notes = self._sum_over_ranks(num_valid)

        loss_sum = run.execution.forward_backward(batches, divisor=num_valid_global.clamp(min=1))
        self._settle()  # the step before, while the device works on this one
        grad_norm = global_norm(self._parameters, loss=loss_sum)
        figures = self._unread = StepFigures(
            step=step,
            loss_sum=loss_sum,
            num_valid=num_valid,
            grad_norm=grad_norm,
            norm_on_host=HostCopy(grad_norm.reshape(1)),
            notes=notes,
        )
        # the same on all ranks, also on those that have nothing to train
        offloads = run.training.enable_cpu_offload
        if offloads or not skips_by_itself(run.optimizer, device=run.device):
            self._settle()
        clip_gradients(self._parameters, norm=grad_norm, max_norm=run.training.max_norm)
        take_step(run.optimizer, norm=grad_norm)
        run.execution.after_update()
        return figures

    def _sum_over_ranks(self, num_valid: Tensor) -> tuple[Tensor, HostCopy]:
        """Return the valid tokens of the global batch and, by the way, the number of ranks whose
        save has failed and the votes to stop."""
        checkpoints = self.run.checkpoints
        failed = checkpoints is not None and checkpoints.has_failed()
        notes = to_device([int(failed), *self._stop.votes()], num_valid.device)
        sums = torch.cat([num_valid.reshape(1), notes])
        dist.all_reduce(sums)  # every rank: a note on one must reach all of them
        dims = self.run.mesh.dims
        # ranks along pp and tp hold equal tokens
        return sums[0] // (dims.pp * dims.tp), HostCopy(sums[1:])

    def _report(self, figures: StepFigures, *, validates: bool) -> None:
        """Reduce the step's figures over all ranks, in one collective, and hand them to the
        sinks, with those of a validation where it is due."""
        run, step = self.run, self.run.progress.step
        counted = figures.num_valid if run.execution.owns_loss else figures.num_valid * 0
        local = torch.stack([figures.loss_sum, counted.double()])
        # all ranks: wherever the last pipeline stage is, everybody learns the loss
        loss_sums, num_valid = gather(local).unbind(1)
        self.last_row = run.meter.report(
            step,
            figures={
                # a step without labels has no loss: neither of these two is finite
                "loss": loss_sums.sum() / num_valid.sum(),
                "max_loss": torch.where(num_valid > 0, loss_sums / num_valid, -torch.inf).max(),
                "grad_norm": figures.grad_norm,
                "lr": run.schedule(step),
                "num_tokens": run.progress.tokens_seen,
                # ranks along tp hold equal tokens
                "valid_token_fraction": num_valid.sum() / run.mesh.dims.tp / run.tokens_per_step,
            },
        )
        if validates and run.validator is not None:
            with run.meter.paused(), self._doing("validating"):
                self.last_row |= run.validator.measure(step)
        for sink in run.sinks:
            sink.write(self.last_row)

    def close(self) -> None:
        """Finish what is in flight: the save, the sinks, the loader's workers; each of them, also
        where another one fails. Done already, it does nothing."""
        with self._open:
            pass

    def close_after_failure(self) -> None:
        """Close what a run that failed has left open; its error stays the one that counts."""
        try:
            self.close()
        except Exception as other:  # noqa: BLE001 - the failure before it is raised
            logger.error("closing the run failed too: %s: %s", type(other).__name__, other)


@contextmanager
def _collecting_garbage_by_hand() -> Iterator[Callable[[], int]]:
    # a rank that collects on its own makes all others wait at the next collective
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # what is there stays: looking through all modules takes a tenth of a second
    gc.disable()
    try:
        yield gc.collect
    finally:
        if was_enabled:
            gc.enable()
        if not was_frozen:
            gc.unfreeze()
