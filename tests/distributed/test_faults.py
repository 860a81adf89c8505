"""What stops a run: numbers that are not finite, and the end of the data."""

from __future__ import annotations

import math
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import DDP, FSDP
from tests.naming import naming
from torchtitan.base.errors import NonFiniteError
from torchtitan.checkpoint.storage import find_steps, read_state
from torchtitan.data.loader import Loader
from torchtitan.mesh.stop import StopRequest, WaitInterrupted
from torchtitan.models.interface import HeadLoss
from torchtitan.trainer import Run, Trainer

pytestmark = pytest.mark.slow


def holdings(parameters: dict[str, nn.Parameter], run: Run) -> dict[str, Tensor]:
    """Copy the weights and what the optimizer keeps of each."""
    held = {}
    for name, parameter in parameters.items():
        held[name] = jobs.full(parameter)
        for key, value in run.optimizer.state[parameter].items():
            if value is not None:
                held[f"{name} {key}"] = jobs.full(value)
    return held


def train_into(value: float, bad_rank: int, job: list[str]) -> tuple[str, bool]:
    """Make one rank's loss bad in step 3; return the error and whether weights and state stayed."""
    before: dict[str, Tensor] = {}

    def spoiled(correct: HeadLoss) -> HeadLoss:
        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            right = correct(x, weight, labels)
            if run.progress.step != 3:
                return right
            before.update(holdings(parameters, run))
            return right * value if dist.get_rank() == bad_rank else right

        return loss

    with jobs.other_loss(spoiled):
        run = jobs.start(job)
    parameters = dict(run.model.named_parameters())  # inside forward they are the gathered ones
    try:
        Trainer(run).train()
    except NonFiniteError as error:
        after = holdings(parameters, run)
        same = before.keys() == after.keys()
        return str(error), same and all(torch.equal(before[name], after[name]) for name in after)
    return "no error", False


LATER = ("--metrics.log_freq=100", "--checkpoint.interval=100")
"""A bad step is read one later, when a kernel has left the weights alone, or has not."""
SGD = "--optimizer.name=SGD"


@pytest.mark.promise("not-finite")
@pytest.mark.parametrize(
    ("value", "found"),
    [
        (math.nan, FSDP),
        (math.inf, (*DDP, *LATER)),
        (math.nan, (*DDP, *LATER, SGD)),  # which skips nothing by itself
        (math.inf, (*LATER, SGD)),
    ],
    ids=["at once", "a step later", "ddp 2, by SGD", "fsdp 2, by SGD"],
)
def test_a_bad_loss_on_one_rank_stops_all_and_leaves_the_weights(
    value: float, found: tuple[str, ...], ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), "--training.local_batch_size=4", *found]
    for message, unchanged in ranks.run(train_into, value, 1, job, world=2):
        assert naming("step 3", value, "rank 1").match(message)
        assert unchanged


def stop_while_waiting(job: list[str]) -> str:
    """Make the loss of step 3 bad, and stop the run while it waits for step 4's samples."""

    def spoiled(correct: HeadLoss) -> HeadLoss:
        def loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            right = correct(x, weight, labels)
            return right * math.nan if run.progress.step == 3 else right

        return loss

    def waits(loader: Loader) -> Any:
        if run.progress.step == 3:
            stop.on_signal(signal.SIGTERM)
            raise WaitInterrupted
        return draw(loader)

    stop = StopRequest()
    stop.defer()

    with jobs.other_loss(spoiled), pytest.MonkeyPatch.context() as patch:
        run = jobs.start(job)
        draw = Loader.__next__
        patch.setattr(Loader, "__next__", waits)
        try:
            Trainer(run, stop=stop).train()
        except NonFiniteError as error:
            return str(error)
    return "no error"


@pytest.mark.promise("not-finite")
def test_a_step_that_was_left_out_is_not_saved_when_a_run_is_stopped(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), "--metrics.log_freq=100", "--checkpoint.interval=100"]
    [message] = ranks.run(stop_while_waiting, job, world=1)
    assert "step 3" in message
    assert find_steps(tmp_path / "run" / "checkpoint") == []


def in_epochs(folder: Path, text: str) -> list[str]:
    (folder / "a.txt").write_text(text)
    data = ["--training.dataset=files", f"--training.dataset_path={folder}/*.txt"]
    steps = ["--training.steps=1000", "--lr_scheduler.total_steps=1000"]
    return [*jobs.write_job(folder), *data, "--training.num_epochs=2", *steps]


@pytest.mark.promise("mixtures")
def test_the_end_of_the_data_ends_the_run_on_all_ranks(ranks: RankPool, tmp_path: Path) -> None:
    """2 epochs of 401 tokens make 24 samples of 32: 3 steps of 8."""
    results = ranks.run(jobs.train, in_epochs(tmp_path, "x" * 400), world=2)
    assert [row["step"] for row in results[0].rows] == [1, 2, 3]
    folder = tmp_path / "run" / "checkpoint"
    assert find_steps(folder) == [3]
    assert read_state(folder / "step-3", "dataloader")["position"] == 24
