"""The training loop.

It receives finished parts (`build.py`) and builds nothing. One optimizer step:

    count the valid tokens of the global batch -> forward and backward of each microbatch, its
    summed loss divided by that count -> global gradient norm -> clip -> update, unless the norm
    is not finite

Ranks add sums, never means, so every split of the batch trains the same model. `mesh/sync.py`
exchanges failed saves and callbacks and requests to stop, and reads a step's norm in the next step.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchtitan.base.device import to_device
from torchtitan.base.errors import StoppedError
from torchtitan.callbacks import CallbackRunner
from torchtitan.checkpoint.state import Progress
from torchtitan.data.loader import Loader, Samples, StreamSamples
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.ranks import gather, tighten_timeout
from torchtitan.mesh.stop import StopRequest, WaitInterrupted
from torchtitan.mesh.sync import StepSync
from torchtitan.metrics.events import EventLog
from torchtitan.metrics.meter import Meter
from torchtitan.metrics.rows import Row
from torchtitan.metrics.sinks import Sink
from torchtitan.models.interface import ModelParts
from torchtitan.optim.clip import clip_gradients, global_norm
from torchtitan.optim.loss import HasFigures, count_valid
from torchtitan.optim.optimizer import optimizer_step, supports_found_inf
from torchtitan.optim.schedule import Schedule, set_lr
from torchtitan.parallel.context.shard import SequenceShard
from torchtitan.parallel.execution import Execution

if TYPE_CHECKING:
    from torchtitan.checkpoint.manager import CheckpointManager
    from torchtitan.metrics.trace import Recorder
    from torchtitan.optim.balance import Balance
    from torchtitan.optim.spikes import SpikeDetector
    from torchtitan.validate import Validator

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run, built."""

    folder: Path
    """Folder of the run's output."""
    device: torch.device
    mesh: Mesh
    model: ModelParts
    execution: Execution
    sequence_shard: SequenceShard
    optimizer: torch.optim.Optimizer
    balance: Balance | None
    """Balance of the experts. None for a model without experts."""
    loss: HasFigures | None
    """The loss, if it has figures of its own, as the loss of pairs has."""
    schedule: Schedule
    spikes: SpikeDetector | None
    loader: Loader
    progress: Progress
    checkpoints: CheckpointManager | None
    validator: Validator | None
    meter: Meter
    sinks: Sequence[Sink]
    recorders: Sequence[Recorder]
    hooks: CallbackRunner
    events: EventLog | None
    """Rank 0 only."""
    training: TrainingConfig
    tokens_per_step: int
    log_freq: int
    train_timeout_seconds: int


@dataclass(frozen=True, kw_only=True)
class StepFigures:
    """Results of a step, on the device."""

    loss_sum: Tensor
    """Summed loss of this rank's valid tokens; 0 on a rank without the last stage."""
    num_valid: Tensor
    """This rank's valid tokens."""
    grad_norm: Tensor
    """Global gradient norm before clipping."""


class Trainer:
    """Runs the training loop."""

    def __init__(
        self,
        run: Run,
        *,
        stop: StopRequest | None = None,
        status: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        """`status`: Context manager factory that shows a status such as "saving"."""
        self.run = run
        self.last_row: Row | None = None
        checkpoints, dims, hooks = run.checkpoints, run.mesh.dims, run.hooks
        self._stop = stop = stop or StopRequest()
        run.loader.waiting = stop.waiting_for_data
        if run.validator is not None:
            run.validator.limit_waits(stop.waiting_for_data)
        self._saved_step = run.progress.step
        save_failed = (lambda: False) if checkpoints is None else checkpoints.has_failed
        self._sync = StepSync(
            stop,
            callback_stops=lambda: bool(hooks.stops),  # not `run`, which refers to stop
            failures=[save_failed, run.hooks.has_failed],
            equal_ranks=dims.pp * dims.tp,  # along these two all hold the same tokens
            device=run.device,
        )
        self._status = status
        # listed once, because walking through all modules takes a millisecond
        self._parameters = [p for p in run.model.parameters() if p.requires_grad]
        self._open = ExitStack()
        parts = [run.checkpoints, *run.recorders, *run.sinks, run.loader, run.validator]
        for part in reversed(parts):  # ExitStack closes in reverse order
            if part is not None:
                self._open.callback(part.close)

    def train(self, *, on_step: Callable[[int], None] = lambda step: None) -> str | None:
        """Train until `training.steps`. The last step is always reported and saved.

        Returns:
            Why the run stopped early, the same on all ranks, or None.

        Raises:
            NonFiniteError: The loss or the gradient norm is not finite; weights are unchanged.
            CheckpointError: A checkpoint could not be saved.
            StalledError: Data took too long.
            StoppedError: Stopped by a signal while it waited for data, with nothing to save.
        """
        run, events = self.run, self.run.events
        try:
            reason = self._train(on_step)
        except BaseException as error:
            if events is not None:
                events.failure(run.progress.step, error)
            raise
        if events is not None:
            events.write("end", step=run.progress.step, reason=reason or "finished")
        return reason

    def _train(self, on_step: Callable[[int], None]) -> str | None:
        run, progress, sync = self.run, self.run.progress, self._sync
        first_step = progress.step + 1
        finished = self._is_finished()
        run.hooks.start(run)
        run.meter.start_interval()
        with _collecting_garbage_by_hand() as collect:
            while not (finished or sync.stopped):
                try:
                    with run.meter.waiting_for_data():
                        microbatches = next(run.loader)
                except WaitInterrupted:
                    self._stop_without_data()
                    break
                progress.step += 1
                figures = self._train_step(microbatches)
                progress.tokens_seen += run.tokens_per_step
                run.meter.count(run.tokens_per_step)
                finished = self._is_finished()
                save_failed, hook_failed = sync.read_flags()
                if save_failed and run.checkpoints is not None:
                    run.checkpoints.wait()  # raises the error of the failed save
                if hook_failed:
                    run.hooks.raise_failure()
                if progress.step == first_step:
                    tighten_timeout(run.train_timeout_seconds, groups=run.mesh.groups())
                    self._stop.data_timeout_seconds = run.train_timeout_seconds
                validates = self._is_validation_due(last=finished)
                logged = progress.step % run.log_freq == 0 or progress.step == 1 or finished
                logged = logged or validates
                if logged:
                    sync.check_pending_norm()
                    self._report(figures, validates=validates)
                if self._save(last=finished) and not finished:
                    sync.is_stopped()  # a signal during the save need not wait for a step
                run.hooks.step(progress.step, self.last_row if logged else None)
                on_step(progress.step)
                for recorder in run.recorders:
                    recorder.step(progress.step)
                if progress.step % run.training.gc_freq == 0:
                    collect()
            sync.check_pending_norm()
            if run.spikes is not None:
                run.spikes.log_pending()
        return run.hooks.end(None if finished else sync.stopped)

    def _stop_without_data(self) -> None:
        """Save the last step of the only rank, which is asked to stop while it waits for data;
        raise StoppedError if there is nothing to save."""
        step, dataset = self.run.progress.step, self.run.loader.dataset
        if step == 0 or isinstance(dataset, StreamSamples):
            # a stream was interrupted, so its state is not the one after the last step
            raise StoppedError(
                f"stopped after step {step} by a signal while waiting for data; run the same "
                f"command to resume from the last checkpoint"
            )
        self._sync.stop_alone()
        if self._saved_step != step:
            self._save(last=False)

    def _is_validation_due(self, *, last: bool) -> bool:
        validator = self.run.validator
        if validator is None or self._sync.stopped:  # stop as soon as possible
            return False
        return validator.is_due(
            self.run.progress.step, last=last, saves=self._is_save_due(last=last)
        )

    def _is_save_due(self, *, last: bool) -> bool:
        checkpoints, now = self.run.checkpoints, self._sync.stopped is not None
        return checkpoints is not None and checkpoints.is_due(last=last, now=now)

    def _save(self, *, last: bool) -> bool:
        if self.run.checkpoints is None or not self._is_save_due(last=last):
            return False
        self._sync.check_pending_norm()  # never save a step whose update was left out
        with self.run.meter.paused(), self._status("saving"):
            path = self.run.checkpoints.save(last=last, validation_loss=self._validation_loss())
        self._saved_step = self.run.progress.step
        self.run.hooks.checkpoint(self._saved_step, path)
        return True

    def _validation_loss(self) -> float | None:
        """Return the validation loss of the current weights, if it was measured."""
        row = self.last_row
        if row is None or row["step"] != self.run.progress.step:
            return None
        return row.get("validation_loss")

    def _is_finished(self) -> bool:
        return self.run.progress.step >= self.run.training.steps

    def _train_step(self, microbatches: Sequence[Samples]) -> StepFigures:
        run, step, sync = self.run, self.run.progress.step, self._sync
        set_lr(run.optimizer, run.schedule(step))
        batches = [run.sequence_shard.take(samples).to(run.device) for samples in microbatches]
        labels = [[batch.labels for batch in batches]]
        if run.loss is not None:  # of pairs; the losses of experts are per label
            labels.append([labels_BS4[..., 0] for labels_BS4 in labels[0]])
        num_valid = torch.stack([torch.stack([*map(count_valid, each)]).sum() for each in labels])
        divisors = sync.sum_valid(num_valid).clamp(min=1)
        num_valid, divisor = num_valid[0], divisors[0]

        if run.loss is not None:
            run.loss.begin()
        if run.balance is not None:
            run.balance.begin(divisors[-1], is_text=[batch.is_text() for batch in batches])
        loss_sum = run.execution.forward_backward(batches, divisor=divisor)
        sync.check_pending_norm()  # of the step before, while the device works on this one
        grad_norm = global_norm(self._parameters, loss=loss_sum)
        sync.defer_norm_check(grad_norm, loss=loss_sum, step=step)
        # the condition must be the same on all ranks, also on one that trains nothing, because
        # the check may raise
        offloads = run.training.enable_cpu_offload
        if offloads or not supports_found_inf(run.optimizer, device=run.device):
            sync.check_pending_norm()  # of this step
        norm, max_norm = grad_norm, run.training.max_norm
        if run.spikes is not None:
            norm, max_norm = run.spikes.check(
                step, loss_sum=loss_sum, divisor=divisor, norm=norm, max_norm=max_norm
            )
        clip_gradients(self._parameters, norm=grad_norm, max_norm=max_norm)
        optimizer_step(run.optimizer, norm=norm)
        if run.balance is not None:
            run.balance.update(norm=norm)
        run.execution.after_update()
        return StepFigures(loss_sum=loss_sum, num_valid=num_valid, grad_norm=grad_norm)

    def _report(self, figures: StepFigures, *, validates: bool) -> None:
        """Reduce the step's figures over all ranks in one collective, validate if it is due, and
        write the row to the sinks."""
        run, step = self.run, self.run.progress.step
        counted = figures.num_valid if run.execution.owns_loss else figures.num_valid * 0
        waited = to_device([round(1e9 * run.meter.data_seconds())], run.device).double() / 1e9
        local = torch.stack([figures.loss_sum, counted.double(), *waited])
        # the last pipeline stage has the loss; all ranks receive it
        loss_sums, num_valid, data_seconds = gather(local).unbind(1)
        # along dp: the cp ranks of one dp rank have parts of the same samples
        dp_losses, dp_valid = (
            sums.view(run.mesh.data.shape).sum((0, 2, 3)) for sums in (loss_sums, num_valid)
        )
        # ranks along tp hold equal tokens
        fraction = num_valid.sum() / run.mesh.dims.tp / run.tokens_per_step
        of_loss = {"valid_token_fraction": fraction} if run.loss is None else run.loss.figures()
        self.last_row = run.meter.report(
            step,
            figures={
                # neither of these two is finite without labels
                "loss": loss_sums.sum() / num_valid.sum(),
                "max_loss": torch.where(dp_valid > 0, dp_losses / dp_valid, -torch.inf).max(),
                "grad_norm": figures.grad_norm,
                "lr": run.schedule(step),
                "num_tokens": run.progress.tokens_seen,
                **of_loss,
                "slowest_data_time_s": data_seconds.max(),
                "slowest_data_rank": data_seconds.argmax(),
                **(run.balance.figures() if run.balance is not None else {}),
                **(run.spikes.figures() if run.spikes is not None else {}),
            },
        )
        if validates and run.validator is not None:
            with run.meter.paused(), self._status("validating"):
                try:
                    # the last one is not left: no later start would measure it
                    votes = (lambda: False) if self._is_finished() else self._sync.is_stopped
                    measured = run.validator.measure(step, is_stopped=votes)
                    self.last_row |= measured
                    self.last_row |= run.hooks.validation(step, self.last_row)
                except WaitInterrupted:
                    if self._sync.stopped is None:
                        self._sync.stop_alone()
        for sink in run.sinks:
            sink.write(dict(self.last_row))

    def close(self) -> None:
        """Close checkpoints, sinks and loaders, each even if another one fails. Idempotent."""
        with self._open:
            pass

    def close_after_failure(self) -> None:
        """Close the parts of a failed run; an error of closing is logged, not raised."""
        try:
            self.close()
        except Exception as other:  # noqa: BLE001 - the failure before it is raised
            logger.error("closing the run failed too: %s: %s", type(other).__name__, other)


@contextmanager
def _collecting_garbage_by_hand() -> Iterator[Callable[[], int]]:
    # a rank that collects garbage on its own delays all ranks at the next collective
    was_enabled, was_frozen = gc.isenabled(), gc.get_freeze_count() > 0
    gc.collect()
    gc.freeze()  # skip existing objects: scanning all modules takes 0.1 s
    gc.disable()
    try:
        yield gc.collect
    finally:
        if was_enabled:
            gc.enable()
        if not was_frozen:
            gc.unfreeze()
