"""Mistakes in files: which setting each message names, and all of them together."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs, loaded
from torchtitan.job import Config


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


@pytest.mark.parametrize("text", ["[training]", "[quantize]", "[quantize.linear]"])
def test_empty_known_tables_load(text: str) -> None:
    assert loaded(text).config == Config()
    assert loaded(f"{text[:-1]}x]").mistakes


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


def test_a_long_value_is_cut_short() -> None:
    [mistake] = loaded("[training]\nsteps = '" + "x" * 500 + "'").mistakes
    assert len(mistake) < 200


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


def test_a_rule_is_silent_while_one_of_its_keys_is_wrong() -> None:
    assert len(loaded('[training]\ndataset = "file"\ndataset_path = "x"').mistakes) == 1
    [mistake] = loaded('[training]\ndataset = "c4"\ndataset_path = "x"').mistakes
    assert mistake.startswith('job.toml: [training] dataset = "c4"')
    both = loaded("[training]\nsteps = 'x'\nglobal_batch_size = 3\nlocal_batch_size = 2").mistakes
    assert [mistake.split(" = ")[0] for mistake in both] == [
        "job.toml: [training] steps",
        "job.toml: [training] global_batch_size",
    ]


@pytest.mark.parametrize(
    ("text", "key", "rate"),
    [
        ("[training]\nsteps = 60", "[training] steps", "0.00024"),
        ("[lr_scheduler]\nwarmup_steps = 100\n[training]\nsteps = 25", "warmup_steps", "0.0002"),
        (
            "[lr_scheduler]\nwarmup_ratio = 0.5\ntotal_steps = 100\n[training]\nsteps = 25",
            "warmup_ratio",
            "0.0004",
        ),
    ],
)
def test_a_warmup_longer_than_the_run_is_warned_of(text: str, key: str, rate: str) -> None:
    [notice] = loaded(text).notices
    assert key in notice
    assert rate in notice


def test_a_warmup_that_the_run_can_hold_is_not() -> None:
    """Nor one of a try of a few steps."""
    for text in ("steps = 200", "steps = 9", "steps = 10\n[lr_scheduler]\nwarmup_ratio = 1.0"):
        assert loaded(f"[training]\n{text}").notices == []


def test_the_last_source_chooses_steps_or_ratio_of_the_warmup(jobs: Jobs) -> None:
    steps, ratio = "[lr_scheduler]\nwarmup_steps = 20", "[lr_scheduler]\nwarmup_ratio = 0.5"
    jobs.write(steps, name="steps.toml")
    schedule = jobs.load(f'base = "steps.toml"\n{ratio}').lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, 0.5)
    schedule = jobs.load(ratio, "--lr_scheduler.warmup_steps=7").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (7, None)
    schedule = jobs.load(steps, "--lr_scheduler.warmup_ratio=none").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (20, None)
