"""Cadence, retention, and saving in the background."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.naming import naming
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import verify
from torchtitan.checkpoint.storage import find_steps
from torchtitan.trainer import Trainer


def steps(folder: Path) -> list[int]:
    return find_steps(folder / "run" / "checkpoint")


@pytest.mark.promise("one-run-per-folder")
@pytest.mark.parametrize(
    ("world", "settings", "expected"),
    [
        (1, ("interval=3", "enable_first_step_checkpoint=true"), [1, 3, 5]),
        (1, ("interval=2", "keep_latest_k=2"), [4, 5]),
        (2, ("interval=2", "keep_latest_k=1", "async_mode=async"), [5]),
    ],
)
def test_cadence_and_retention(
    world: int, settings: tuple[str, ...], expected: list[int], ranks: RankPool, tmp_path: Path
) -> None:
    overrides = [f"--checkpoint.{setting}" for setting in settings]
    job = [*jobs.write_job(tmp_path), "--training.steps=5", *overrides]
    ranks.run(jobs.train, job, world=world)
    assert steps(tmp_path) == expected


def fail_in_the_background(job: list[str]) -> tuple[str, int]:
    """Take the folder away while steps go on: the save in flight fails, the run stops."""
    run = jobs.start(job)
    correct = storage._save_tensors

    def failing(*args: object, **kwargs: object) -> None:
        raise CheckpointError("the disk is gone")

    storage._save_tensors = failing
    try:
        Trainer(run).train()
    except CheckpointError as error:
        return str(error), run.progress.step
    finally:
        storage._save_tensors = correct
    return "no error", run.progress.step


@pytest.mark.promise("kill-save")
@pytest.mark.slow
def test_what_a_dead_save_left_is_replaced(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=2"]
    ranks.run(jobs.train, job, world=1)
    folder = tmp_path / "run" / "checkpoint"
    shutil.copytree(folder / "step-2", folder / ".step-4.tmp")
    (folder / ".step-4.tmp" / "manifest.json").unlink()  # it comes last
    (folder / ".step-4.tmp" / "model" / "stray").write_text("")
    ranks.run(jobs.train, [*job[:-1], "--training.steps=4"], world=1)
    assert steps(tmp_path) == [2, 4]
    assert not (folder / "step-4" / "model" / "stray").exists()
    assert not (folder / ".step-4.tmp").exists()


def first_step(job: list[str]) -> int:
    return jobs.start(job).progress.step


@pytest.mark.promise("intentions")
@pytest.mark.slow
def test_going_back_takes_a_new_folder_and_leaves_the_old_one_as_it_was(
    ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), "--checkpoint.interval=2"]
    [through] = ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    checkpoints = tmp_path / "run" / "checkpoint"
    for place in (tmp_path / "run", checkpoints):
        back = [
            *jobs.write_job(tmp_path, name=f"back_from_{place.name}", cache=tmp_path / "cache"),
            "--checkpoint.interval=2",
            f"--checkpoint.initial_load_path={place}",
            "--checkpoint.initial_load_model_only=false",
            "--checkpoint.load_step=2",
        ]
        assert ranks.run(first_step, back, world=1) == [2]
        [result] = ranks.run(jobs.train, [*back, "--training.steps=6"], world=1)
        assert [row["loss"] for row in result.rows] == [row["loss"] for row in through.rows[2:]]
        assert result.state_hash == through.state_hash
        assert ranks.run(first_step, back, world=1) == [6]  # its own steps come first
        [message] = ranks.run(jobs.refusal, [*back, "--checkpoint.load_step=4"], world=1)
        assert "checkpoint.load_step 4 " in message
    assert sorted(path.name for path in checkpoints.iterdir()) == ["step-2", "step-4", "step-6"]
    [message] = ranks.run(
        jobs.refusal,
        [*back, f"--job.dump_folder={tmp_path}/x", "--checkpoint.load_step=3"],
        world=1,
    )
    assert naming("checkpoint.load_step", "step 3").match(message)


@pytest.mark.promise("kill-save")
@pytest.mark.slow
def test_damaged_newer_steps_come_before_none_of_ours(ranks: RankPool, tmp_path: Path) -> None:
    """They are passed over, and set aside by the first save, also if it is of a later step."""
    job = [*jobs.write_job(tmp_path), "--checkpoint.keep_latest_k=1"]
    kept = [*job, "--checkpoint.interval=2", "--checkpoint.keep_latest_k=0"]
    [through] = ranks.run(jobs.train, [*kept, "--training.steps=6"], world=1)
    folder = tmp_path / "run" / "checkpoint"
    (folder / "step-4" / "manifest.json").unlink()
    (folder / "step-6" / "model" / ".metadata").unlink()
    ranks.run(jobs.train, [*kept, "--training.steps=5", "--checkpoint.interval=5"], world=1)
    assert steps(tmp_path) == [2, 5]
    assert (folder / "step-4.damaged" / "model").is_dir()
    assert (folder / "step-6.damaged" / "manifest.json").is_file()
    # whole again one day, they are still of a course that was left
    assert ranks.run(first_step, job, world=1) == [5]
    [result] = ranks.run(jobs.train, [*job, "--training.steps=6"], world=1)
    assert result.state_hash == through.state_hash
    assert steps(tmp_path) == [6]
    assert verify(folder / "step-6", group=None) == []


@pytest.mark.promise("kill-save")
@pytest.mark.slow
def test_a_failed_background_save_stops_all_ranks_at_the_same_step(
    ranks: RankPool, tmp_path: Path
) -> None:
    overrides = ["--checkpoint.async_mode=async", "--checkpoint.interval=2"]
    job = [*jobs.write_job(tmp_path), *overrides]
    answers = ranks.run(fail_in_the_background, job, world=2)
    messages, steps_done = zip(*answers, strict=True)
    assert all("the disk is gone" in message for message in messages)
    assert steps_done[0] == steps_done[1] in (3, 4)  # at the latest when the next save is due
