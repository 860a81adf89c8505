"""Mistakes in files: which setting each message names, and all of them together."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs, loaded


@pytest.mark.parametrize(
    ("text", "place", "meant"),
    [
        ("[optimizer]\nlrr = 1.0", "[optimizer] lrr = 1.0", "[optimizer] lr?"),
        ("[model]\nsteps = 5", "[model] steps = 5", "[training] steps?"),
        ("[trainning]\nsteps = 5", "[trainning] steps = 5", "[training] steps?"),
        ("steps = 5", "steps = 5", "[training] steps?"),
        ("[job]\nconfig_file = 'x'", '[job] config_file = "x"', 'base = "other.toml"'),
    ],
)
def test_wrong_names(text: str, place: str, meant: str) -> None:
    [mistake] = loaded(text).mistakes
    assert mistake.startswith(f"job.toml: {place}")
    assert meant in mistake


@pytest.mark.promise("settings")
@pytest.mark.parametrize(
    ("section", "line"),
    [
        ("training", 'steps = "10"'),
        ("training", "steps = 10.0"),
        ("training", "steps = 2024-01-01"),
        ("metrics", 'enable_wandb = "true"'),
        ("model", "flavor = 8"),
        ("activation_checkpoint", "selective_ac_option = 2"),
        ("job", 'dump_folder = "a\\u0000b"'),
    ],
)
def test_types_in_files_are_strict(section: str, line: str) -> None:
    [mistake] = loaded(f"[{section}]\n{line}").mistakes
    assert mistake.startswith(f"job.toml: [{section}] {line}: must ")


@pytest.mark.promise("mistakes")
def test_all_mistakes_come_together(jobs: Jobs) -> None:
    jobs.write("[modle]\nname = 1\n[optimizer]\nlr = -1.0", name="base.toml")
    mistakes = jobs.mistakes(
        'base = "base.toml"\n[training]\nsteps = "ten"\nlocal_batch_size = 2.5\nstepz = 4\n'
        "[memory_estimation]\nenable = true\n[training.dataloader]\npersistent_workers = true\n"
        "[lr_scheduler]\nlr_min = 0.1\nmin_lr_factor = 0.2",
        "--training.seq_len",
        "0",
        "--chekpoint.enable",
    )
    assert {mistake.split(": ")[1].split(" = ")[0] for mistake in mistakes} == {
        "[modle] name",
        "[optimizer] lr",
        "[training] steps",
        "[training] local_batch_size",
        "[training] stepz",
        "[memory_estimation] enable",
        "[training.dataloader] persistent_workers",
        "[lr_scheduler] lr_min",
        "--training.seq_len 0",
        "--chekpoint.enable true",
    }
    assert len(mistakes) == 10


def test_the_last_source_chooses_steps_or_ratio_of_the_warmup(jobs: Jobs) -> None:
    steps, ratio = "[lr_scheduler]\nwarmup_steps = 20", "[lr_scheduler]\nwarmup_ratio = 0.5"
    jobs.write(steps, name="steps.toml")
    schedule = jobs.load(f'base = "steps.toml"\n{ratio}').lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, 0.5)
    schedule = jobs.load(ratio, "--lr_scheduler.warmup_steps=7").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (7, None)
    schedule = jobs.load(steps, "--lr_scheduler.warmup_ratio=none").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (20, None)
