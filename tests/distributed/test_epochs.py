"""A run that ends with training.num_epochs: its length is known at the start, and the learning rate
is planned over it, in any layout and after any stop."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY
from tests.naming import naming
from torchtitan.metrics.events import read_events

pytestmark = pytest.mark.slow

LR = 0.002
UNTIMED = TINY.replace("\nsteps = 20", "").replace("warmup_steps = 5\ntotal_steps = 20", "")
"""No number of steps is given: epochs and the schedule are to find it."""
CONTINUE = "--checkpoint.mode=continue"


def write_chats(folder: Path, *, name: str) -> list[str]:
    """100 chats, 3 times, make 300 samples: 18 steps of 16."""
    chats = [
        {
            "messages": [
                {"role": "user", "content": f"{i} and 1?"},
                {"role": "assistant", "content": str(i + 1)},
            ]
        }
        for i in range(100)
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    return [
        *jobs.write_job(folder, UNTIMED, name=name),
        f"--optimizer.lr={LR}",
        "--training.dataset=examples",
        f"--training.dataset_path={folder}/chats.jsonl",
        "--training.num_epochs=3",
        "--training.seq_len=64",
        "--training.local_batch_size=8",
        "--training.global_batch_size=16",
        "--lr_scheduler.warmup_ratio=0.1",
        "--checkpoint.interval=14",
    ]


def write_text(folder: Path) -> list[str]:
    """401 tokens, twice, make 24 samples of 32: 3 steps of 8."""
    (folder / "a.txt").write_text("x" * 400)
    return [
        *jobs.write_job(folder, UNTIMED),
        f"--optimizer.lr={LR}",
        "--training.dataset=files",
        f"--training.dataset_path={folder}/a.txt",
        "--training.num_epochs=2",
        "--lr_scheduler.warmup_steps=0",
    ]


def rates(result: jobs.Result) -> list[float]:
    return [row["lr"] for row in result.rows]


def digits(result: jobs.Result) -> list[tuple[float, ...]]:
    return [(row["step"], row["lr"], row["loss"], row["grad_norm"]) for row in result.rows]


@pytest.mark.promise("learning-rate", "mixtures")
def test_the_rate_of_100_chats_3_times_is_planned_over_their_18_steps(
    ranks: RankPool, tmp_path: Path
) -> None:
    """Also of a run that was killed, and goes on in the same layout or in another one."""
    [through] = ranks.run(jobs.train, write_chats(tmp_path, name="whole"), world=1)
    falling = [LR * n / 16 for n in range(16, 0, -1)]
    assert rates(through) == pytest.approx([LR / 2, LR, *falling])
    assert max(rates(through)) == LR

    folder = tmp_path / "whole"
    assert [row["last_step"] for row in read_events(folder) if row["event"] == "start"] == [18]
    shutil.rmtree(folder / "checkpoint" / "step-18")
    shutil.copytree(folder, tmp_path / "moved")
    [resumed] = ranks.run(jobs.train, write_chats(tmp_path, name="whole"), world=1)
    assert digits(resumed) == digits(through)
    assert resumed.state_hash == through.state_hash
    moved, _ = ranks.run(jobs.train, write_chats(tmp_path, name="moved"), world=2)
    assert rates(moved) == rates(through)
    losses = [[row["loss"] for row in result.rows] for result in (moved, through)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


@pytest.mark.promise("learning-rate")
def test_more_epochs_follow_the_schedule_of_all(ranks: RankPool, tmp_path: Path) -> None:
    job = write_text(tmp_path)
    ranks.run(jobs.train, job, world=1)
    [lines] = ranks.run(jobs.logged, job, world=1)  # the same
    assert any("Resumed from" in line for line in lines)
    longer = [*job, "--training.num_epochs=4"]
    [message] = ranks.run(jobs.refusal, [*longer, "--optimizer.lr=1e-3"], world=1)
    assert naming("lr_scheduler.total_steps", "2 epochs", "4 epochs").match(message)
    [found] = ranks.run(jobs.train, longer, world=1)
    assert rates(found)[3:] == pytest.approx([LR * n / 6 for n in (3, 2, 1)])
    # half the batch for what is left: 2 epochs of 12 samples make 6 steps more
    smaller = [*job, "--training.num_epochs=6", "--training.global_batch_size=4", CONTINUE]
    [found] = ranks.run(jobs.train, smaller, world=1)
    assert rates(found)[6:] == pytest.approx([LR * n / 12 for n in range(6, 0, -1)])
    [lines] = ranks.run(jobs.logged, smaller, world=1)  # its own command recovers it
    assert any("Resumed from" in line and "step-12" in line for line in lines)
