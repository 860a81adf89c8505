"""What makes two jobs different trainings, and what does not."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.jobs import Jobs
from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.base.files import StoredJSON
from torchtitan.config.settings import to_toml
from torchtitan.resume_rules import (
    Job,
    compare_with_checkpoint,
    trajectory_differences,
)

BEFORE = """
[training]
steps = 100
seq_len = 256
global_batch_size = 16
"""


def differences(
    jobs: Jobs,
    *options: str,
    before: str = BEFORE,
    dp: tuple[int | None, int | None] = (None, None),
) -> list[str]:
    then = Job.stored(to_toml(jobs.load(before)), dp=dp[0])
    return trajectory_differences(then, Job(config=jobs.load(before, *options), dp=dp[1]))


@pytest.mark.promise("intentions")
@pytest.mark.parametrize(
    "options",
    [
        ["--job.dump_folder=x", "--job.description=y"],
        ["--checkpoint.enable", "--checkpoint.interval=7"],
        ["--validation.enable", "--validation.freq=7", "--validation.dataset=synthetic"],
        ["--parallelism.data_parallel_shard_degree=2"],
        ["--training.dataloader.num_workers=2"],
        ["--training.dataset_cache=x", "--training.gc_freq=2", "--training.enable_cpu_offload"],
        ["--training.local_batch_size=4"],  # the global batch is pinned
        ["--optimizer.implementation=for-loop", "--debug.deterministic"],
        ["--router.log_layers"],
        ["--training.attention_kernel=flash"],
    ],
)
def test_settings_that_do_not_count(jobs: Jobs, options: list[str]) -> None:
    assert differences(jobs, *options) == []


@pytest.mark.promise("intentions")
@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (["--training.seq_len=512"], "training.seq_len: stored 256, now 512"),
        (["--debug.seed=1"], "debug.seed: stored 0, now 1"),
        (["--optimizer.lr=0.1"], "optimizer.lr: stored 0.0008, now 0.1"),
        (["--optimizer.no_decay_params=x"], 'stored ["*norm*", "*.bias"], now ["x"]'),
        (["--model.flavor=8B"], 'model.flavor: stored "debugmodel", now "8B"'),
        (["--training.dataset=synthetic"], 'stored "python_stdlib", now "synthetic"'),
        (["--training.global_batch_size=32"], "training.global_batch_size: stored 16, now 32"),
        (["--lr_scheduler.warmup_steps=7"], "lr_scheduler.warmup_steps: stored 200, now 7"),
        (["--training.mixed_precision_param=float32"], 'stored "auto", now "float32"'),
        (["--validation.holdout_fraction=0.1"], "holdout_fraction: stored none, now 0.1"),
    ],
)
def test_settings_that_count(jobs: Jobs, options: list[str], difference: str) -> None:
    [found] = differences(jobs, *options)
    assert difference in found
    assert found.startswith(options[0].split("=")[0][2:] + ": ")


def test_the_global_batch_that_results_is_what_counts(jobs: Jobs) -> None:
    local_4 = "--training.local_batch_size=4"
    assert differences(jobs, local_4, before="", dp=(2, 4)) == []
    [found] = differences(jobs, before="", dp=(2, 4))
    assert found == "training.global_batch_size: stored 16, now 32 (8 on each of 4 ranks)"
    assert differences(jobs, "--training.global_batch_size=-1", dp=(4, 2)) == []
    [found] = differences(jobs, local_4, before="", dp=(2, 2))
    assert found == "training.global_batch_size: stored 16, now 8 (4 on each of 2 ranks)"


@pytest.mark.promise("learning-rate")
def test_more_steps_bend_the_curve_unless_the_total_is_pinned(jobs: Jobs) -> None:
    [found] = differences(jobs, "--training.steps=200")
    assert found == "lr_scheduler.total_steps: stored 100, now 200 (from training.steps)"
    pinned = BEFORE + "[lr_scheduler]\ntotal_steps = 200"
    assert differences(jobs, "--training.steps=200", before=pinned) == []
    # pinning afterwards what was meant before is no change
    assert differences(jobs, "--training.steps=50", "--lr_scheduler.total_steps=100") == []


def test_stored_settings_that_cannot_be_read_are_an_error() -> None:
    with pytest.raises(ConfigError, match=naming("line 1")):
        Job.stored("= =")
    with pytest.raises(ConfigError, match=r"\[training\] stepz = 1"):
        Job.stored("[training]\nstepz = 1")
    for setting in ('training.steps = "a:b"', 'checkpoint.enable = "a:b"', 'optimizer.lr = "a:b"'):
        with pytest.raises(ConfigError, match=setting.partition(" ")[0].partition(".")[2]):
            Job.stored(setting)


@pytest.mark.parametrize(
    "option",
    ["--training.dataset_path=y", "--training.chat_template=y", "--model.tokenizer_path=byte"],
)
def test_where_the_data_lie_counts_unless_their_fingerprint_is_compared(
    jobs: Jobs, option: str
) -> None:
    before = '[training]\ndataset = "examples"\ndataset_path = "x"'
    then, now = jobs.load(before), Job(config=jobs.load(before, option))
    [difference] = trajectory_differences(Job.stored(to_toml(then)), now)
    assert difference.startswith(option[2:].split("=")[0])
    assert trajectory_differences(Job.stored(to_toml(then)), now, data_is_checked=True) == []


@pytest.mark.parametrize(
    ("before", "after", "step", "expected"),
    [
        ("num_epochs = 1\nsteps = 10", "num_epochs = 1", 10, True),
        ("num_epochs = 1", "num_epochs = 2", 38, True),
        ("num_epochs = 1", "num_epochs = 1\nsteps = 20", 38, False),
        ("steps = 5", "steps = 9", 5, True),
        ("steps = 5", "steps = 9", 4, False),
    ],
)
def test_a_run_that_only_has_more_steps_is_longer(
    jobs: Jobs, before: str, after: str, step: int, expected: bool
) -> None:
    files = {"steps = 5": 5, "num_epochs = 1\nsteps = 10": 10}
    then, now = (jobs.load(f"[training]\n{text}") for text in (before, after))
    manifest = StoredJSON(
        Path("manifest.json"),
        {"config": to_toml(then), "step": step, "last_step": files.get(before, 38), "layout": {}},
    )
    assert compare_with_checkpoint(manifest, Job(config=now, dp=1)).is_longer == expected
