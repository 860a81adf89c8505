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

if __name__ == "__main__":
    from torchtitan.base.path import drop_current_folder

    drop_current_folder()

from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from torchtitan.checkpoint.manager import build_group
from torchtitan.checkpoint.state import Component
from torchtitan.checkpoint.storage import write

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.parallel.execution import Batch
    from torchtitan.trainer import Run

GRADIENTS = "gradients"
NUM_STEPS = "GRADIENT_STEPS"
FLOAT64 = "TRAIN_IN_FLOAT64"


class RecordedExecution:
    """The execution of a run, which writes the gradients of the first steps to `folder`/step-N."""

    def __init__(self, run: Run, *, folder: Path, num_steps: int) -> None:
        self.owns_loss, self.evaluate = run.execution.owns_loss, run.execution.evaluate
        self.after_update = run.execution.after_update
        self._run, self._folder, self._num_steps = run, folder, num_steps
        self._group = build_group(3600)

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Run the batches of a step."""
        run = self._run
        loss_sum = run.execution.forward_backward(batches, divisor=divisor)
        if (step := run.progress.step) <= self._num_steps:
            parameters = run.model.named_parameters()
            gradients = {name: p.grad for name, p in parameters if p.grad is not None}
            content = {GRADIENTS: Component(tensors=gradients)}
            folder = self._folder / f"step-{step}"
            write(folder, content, manifest={"step": step}, group=self._group)
        return loss_sum


def record_gradients(run: Run, *, folder: Path, num_steps: int) -> Run:
    """Return a run that writes the gradients of its first steps, by name."""
    return replace(run, execution=RecordedExecution(run, folder=folder, num_steps=num_steps))


def in_float64(settings: Any) -> Any:
    """Return a job's settings with float64 everywhere, which their checks would refuse."""
    wide, training = copy(settings), copy(settings.training)
    for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce"):
        object.__setattr__(training, name, "float64")
    object.__setattr__(wide, "training", training)
    return wide


def share_gpus() -> None:
    """If this machine has fewer GPUs than ranks, assign the ranks to them in turn.

    NCCL refuses two ranks of one host on a GPU. So each rank names a host of its own, and the ranks
    talk over sockets (seen with NCCL 2.28).
    """
    num_gpus, num_ranks = torch.cuda.device_count(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if 0 < num_gpus < num_ranks:
        os.environ["LOCAL_RANK"] = str(int(os.environ["LOCAL_RANK"]) % num_gpus)
        os.environ["NCCL_HOSTID"] = f"rank{os.environ['RANK']}"
        os.environ |= dict.fromkeys(
            ("NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE"), "1"
        )


def main(argv: list[str]) -> None:
    """Train, and end this process."""
    share_gpus()
    train: Any = import_module("torchtitan.train")
    build_run = train.build_run

    def build_and_record(settings: Any, **kwargs: Any) -> Run:
        run = build_run(in_float64(settings) if os.environ[FLOAT64] else settings, **kwargs)
        assert run.checkpoints is not None, "checkpoints are enabled by the comparison"
        if run.progress.step == 0:
            run.checkpoints.save(last=False)
        folder, num_steps = Path(settings.job.dump_folder), int(os.environ[NUM_STEPS])
        return record_gradients(run, folder=folder / GRADIENTS, num_steps=num_steps)

    train.build_run = build_and_record
    train.main_and_exit(argv)


if __name__ == "__main__":
    main(sys.argv[1:])
