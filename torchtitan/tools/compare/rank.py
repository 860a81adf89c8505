"""One rank of a compared layout: the trainer, which also saves what the comparison needs.

Started instead of `torchtitan.train`, so that a single launch yields the initial and final weights
and the gradients of the first steps. The run's own checkpoint manager saves the initial weights in
step 0 and names them alike in every layout. Gradients are written in the same way, after they are
summed over all ranks and before they are clipped. The trainer has no settings for this, so its
`build_run` is replaced.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torchtitan.checkpoint.manager import build_group
from torchtitan.checkpoint.state import Component
from torchtitan.checkpoint.storage import write

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.parallel.execution import Batch, Execution
    from torchtitan.trainer import Run

GRADIENTS = "gradients"
NUM_STEPS = "GRADIENT_STEPS"
FLOAT64 = "TRAIN_IN_FLOAT64"


class ObservedExecution:
    """An execution that calls `after()` after each step's backward passes."""

    def __init__(self, execution: Execution, *, after: Callable[[], None]) -> None:
        self.owns_loss, self.evaluate = execution.owns_loss, execution.evaluate
        self.after_update = execution.after_update
        self._run, self._after = execution.forward_backward, after

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Run the batches of a step."""
        loss_sum = self._run(batches, divisor=divisor)
        self._after()
        return loss_sum


def record_gradients(run: Run, *, folder: Path, num_steps: int) -> Run:
    """Return a run that writes the gradients of its first steps to `folder`/step-N, by name."""
    group = build_group(3600)

    def write_gradients() -> None:
        step = run.progress.step
        if step <= num_steps:
            parameters = run.model.named_parameters()
            gradients = {name: p.grad for name, p in parameters if p.grad is not None}
            content = {GRADIENTS: Component(tensors=gradients)}
            write(folder / f"step-{step}", content, manifest={"step": step}, group=group)

    return replace(run, execution=ObservedExecution(run.execution, after=write_gradients))


def in_float64(settings: Any) -> Any:
    """Return a job's settings with float64 everywhere, which their checks would refuse."""
    wide, training = copy(settings), copy(settings.training)
    for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce"):
        object.__setattr__(training, name, "float64")
    object.__setattr__(wide, "training", training)
    return wide


def main(argv: list[str]) -> None:
    """Train, and end this process."""
    train: Any = import_module("torchtitan.train")
    build_run = train.build_run

    def build_and_observe(settings: Any, **kwargs: Any) -> Run:
        run = build_run(in_float64(settings) if os.environ[FLOAT64] else settings, **kwargs)
        assert run.checkpoints is not None, "checkpoints are enabled by the comparison"
        if run.progress.step == 0:
            run.checkpoints.save(last=False)
        folder, num_steps = Path(settings.job.dump_folder), int(os.environ[NUM_STEPS])
        return record_gradients(run, folder=folder / GRADIENTS, num_steps=num_steps)

    train.build_run = build_and_observe
    train.main_and_exit(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
