"""Rules between keys: the place that a message names, and rules that are silent."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs, loaded


def test_a_rule_points_at_what_was_written(jobs: Jobs) -> None:
    # shard_degree and total_steps are in order by themselves: the other key broke the rule
    [mistake] = jobs.mistakes("[lr_scheduler]\ntotal_steps = 50", "--training.steps", "60")
    assert mistake.startswith("job.toml: [lr_scheduler] total_steps = 50: ")
    [mistake] = jobs.mistakes("[training]\nglobal_batch_size = 8", "--training.local_batch_size=3")
    assert mistake.startswith("job.toml: [training] global_batch_size = 8: ")
    assert "local_batch_size (3)" in mistake
    assert "got 8" in mistake


def test_a_rule_is_silent_while_one_of_its_keys_is_wrong(jobs: Jobs) -> None:
    [mistake] = jobs.mistakes('[training]\ndataset = "file"\ndataset_path = "x"')
    assert "'files'" in mistake
    [mistake] = jobs.mistakes('[training]\ndataset = "c4"\ndataset_path = "x"')
    assert mistake.startswith('job.toml: [training] dataset = "c4"')
    [mistake] = jobs.mistakes('[training]\ndataset_path = "x"', "--training.dataset")
    assert mistake.startswith("command line: --training.dataset")


def test_other_rules_still_speak_beside_a_wrong_value(jobs: Jobs) -> None:
    found = jobs.mistakes("[training]\nsteps = 'x'\nglobal_batch_size = 3\nlocal_batch_size = 2")
    assert [mistake.split(" = ")[0] for mistake in found] == [
        "job.toml: [training] steps",
        "job.toml: [training] global_batch_size",
    ]


@pytest.mark.parametrize(
    ("text", "place", "reached"),
    [
        ("[training]\nsteps = 60", "[training] steps = 60: ", "ends at 0.00024"),
        (
            "[lr_scheduler]\nwarmup_steps = 100\n[training]\nsteps = 25\n[optimizer]\nlr = 0.01",
            "[lr_scheduler] warmup_steps = 100: ",
            "ends at 0.0025",
        ),
        (
            "[lr_scheduler]\nwarmup_ratio = 0.5\ntotal_steps = 100\n[training]\nsteps = 25",
            "[lr_scheduler] warmup_ratio = 0.5: ",
            "ends at 0.0004",
        ),
    ],
)
def test_a_warmup_longer_than_the_run_is_warned_of(text: str, place: str, reached: str) -> None:
    [notice] = loaded(text).notices
    assert notice.startswith(f"job.toml: {place}")
    assert reached in notice
    assert "warmup_ratio" in notice


def test_a_warmup_that_the_run_can_hold_is_not() -> None:
    """Nor one of a try of a few steps."""
    for text in ("steps = 200", "steps = 9", "steps = 10\n[lr_scheduler]\nwarmup_ratio = 1.0"):
        assert loaded(f"[training]\n{text}").notices == []


def test_the_last_place_chooses_how_the_warmup_is_said(jobs: Jobs) -> None:
    steps, ratio = "[lr_scheduler]\nwarmup_steps = 20", "[lr_scheduler]\nwarmup_ratio = 0.5"
    jobs.write(steps, name="steps.toml")
    schedule = jobs.load(f'base = "steps.toml"\n{ratio}').lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (None, 0.5)
    schedule = jobs.load(ratio, "--lr_scheduler.warmup_steps=7").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (7, None)
    schedule = jobs.load(steps, "--lr_scheduler.warmup_ratio=none").lr_scheduler
    assert (schedule.warmup_steps, schedule.warmup_ratio) == (20, None)
    neither = ("--lr_scheduler.warmup_steps=0", "--lr_scheduler.warmup_ratio=0")
    for text in ("", steps, ratio):
        assert jobs.load(text, *neither).lr_scheduler.num_warmup_steps(100) == 0


@pytest.mark.parametrize(
    ("text", "key"),
    [
        (
            "[training]\nseq_len = 2047\n[parallelism]\ntensor_parallel_degree = 2\n"
            "enable_async_tensor_parallel = false",
            "[training] seq_len",
        ),
        (
            '[checkpoint]\nenable = true\ncreate_seed_checkpoint = false\nmode = "finetune"',
            "[checkpoint] mode",
        ),
    ],
)
def test_a_key_that_asks_for_nothing_silences_no_rule(text: str, key: str) -> None:
    [mistake] = loaded(text).mistakes
    assert f"job.toml: {key} = " in mistake
