"""One rank of a layout that is compared: the trainer's own command, with more of it saved.

Started in the place of `torchtitan.train`, so that one launch shows both ends of the training,
the gradients of its first steps, and which experts tokens were sent to (`routing.py`). The initial
weights go into a checkpoint of step 0 by the run's own manager, which knows them by name in every
layout. Gradients are written in the same way, once they are summed over all ranks and before they
are clipped. The trainer has no setting for any of it, hence the function put in the place of its
`build_run`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

    from torchtitan.parallel.execution import Batch
    from torchtitan.trainer import Run

PIDS = "pids"
GRADIENTS = "gradients"
NUM_STEPS = "GRADIENT_STEPS"
REPLAYED = "REPLAYED_CHOICES"
FLOAT64 = "TRAIN_IN_FLOAT64"


def leave_pid(argv: list[str]) -> None:
    """Write down this process, so that a hanging rank can be ended: it is in no one's session."""
    pids = _folder(argv) / PIDS
    pids.mkdir(parents=True, exist_ok=True)
    (pids / str(os.getpid())).touch()


def _folder(argv: list[str]) -> Path:
    option = "--job.dump_folder="
    [folder] = [word.removeprefix(option) for word in argv if word.startswith(option)]
    return Path(folder)


def record_gradients(run: Run, *, folder: Path, num_steps: int) -> Run:
    """Return the run, which writes the gradients of its first steps to `folder`/step-N: those of
    every parameter that trains, by name."""
    from torchtitan.checkpoint.manager import build_group
    from torchtitan.checkpoint.state import Component
    from torchtitan.checkpoint.storage import write

    group = build_group(3600)

    class Recording:
        owns_loss = run.execution.owns_loss
        evaluate = run.execution.evaluate
        after_update = run.execution.after_update

        def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
            loss_sum = run.execution.forward_backward(batches, divisor=divisor)
            step = run.progress.step
            if step <= num_steps:
                named = run.model.named_parameters()
                gradients = {name: p.grad for name, p in named if p.grad is not None}
                content = {GRADIENTS: Component(tensors=gradients)}
                write(folder / f"step-{step}", content, manifest={"step": step}, group=group)
            return loss_sum

    return replace(run, execution=Recording())


def in_float64(settings: Any) -> Any:
    """Return a job's settings as its checks would refuse them: rounding in float64 is none."""
    wide, training = copy(settings), copy(settings.training)
    for name in ("dtype", "mixed_precision_param", "mixed_precision_reduce"):
        object.__setattr__(training, name, "float64")
    object.__setattr__(wide, "training", training)
    return wide


def main(argv: list[str]) -> None:
    """Train, and end this process."""
    from torchtitan.tools.compare.layouts.routing import CHOICES, watch_routing

    train: Any = import_module("torchtitan.train")
    build_run = train.build_run

    def build_and_save(settings: Any, **kwargs: Any) -> Run:
        run = build_run(in_float64(settings) if os.environ.get(FLOAT64) else settings, **kwargs)
        assert run.checkpoints is not None, "the comparison switches checkpoints on"
        if run.progress.step == 0:
            run.checkpoints.save(last=False)
        folder, replayed = _folder(argv), os.environ.get(REPLAYED)
        run = watch_routing(
            run,
            folder=folder / CHOICES,
            rank=int(os.environ.get("RANK", "0")),
            replayed=Path(replayed) if replayed else None,
        )
        num_steps = int(os.environ[NUM_STEPS])
        return record_gradients(run, folder=folder / GRADIENTS, num_steps=num_steps)

    train.build_run = build_and_save
    train.main_and_exit(argv)


if __name__ == "__main__":
    leave_pid(sys.argv[1:])  # before torch is imported, which takes seconds
    main(sys.argv[1:])
