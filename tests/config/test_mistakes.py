"""Wrong names and wrong values in files: each message, and all of them together."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs, loaded
from torchtitan.job import Config

# --- names -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "place", "remedy"),
    [
        ("[optimizer]\nlrr = 1.0", "[optimizer] lrr = 1.0", "did you mean [optimizer] lr?"),
        ("[model]\nsteps = 5", "[model] steps = 5", "did you mean [training] steps?"),
        (
            "[training]\nnum_workers = 5",
            "[training] num_workers = 5",
            "did you mean [training.dataloader] num_workers?",
        ),
        (
            "[trainning]\nsteps = 5\nseq_len = 5",
            "unknown section [trainning]",
            "did you mean [training]?",
        ),
        ("[trainning]", "unknown section [trainning]", "did you mean [training]?"),
        (
            "[training.dataloadr]\nnum_workers = 5",
            "unknown section [training.dataloadr]",
            "did you mean [training.dataloader]?",
        ),
        ("steps = 5", "steps = 5", "did you mean [training] steps?"),
        ("training = 5", "training = 5", "write [training] key ..."),
        ("[[training]]\nsteps = 5", "training = [{steps = 5}]", "write [training] key ..."),
        (
            "[training.steps]\nx = 5",
            "[training.steps] x = 5",
            "[training] steps is a value, not a table",
        ),
        (
            "[profiling]\nprofile_frequency = 5",
            "[profiling] profile_frequency = 5",
            "did you mean [profiling] profile_freq?",
        ),
        (
            "[debug]\nxyzzy = 1",
            "[debug] xyzzy = 1",
            "valid are seed, deterministic, deterministic_warn_only, log_sample_hashes",
        ),
        (
            "[job]\nconfig_file = 'x'",
            '[job] config_file = "x"',
            'to build on another file write base = "other.toml" at the top',
        ),
    ],
)
def test_wrong_names(text: str, place: str, remedy: str) -> None:
    [mistake] = loaded(text).mistakes
    assert mistake.startswith(f"job.toml: {place}")
    assert mistake.endswith(remedy)


@pytest.mark.parametrize("text", ["[training]", "[quantize]", "[quantize.linear]", "[profiling]"])
def test_empty_known_tables_load(text: str) -> None:
    assert loaded(text).checked() == Config()


# --- values ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "line", "rule"),
    [
        ("training", 'steps = "ten"', "must be an integer"),
        ("training", 'steps = "10"', "must be an integer"),
        ("training", "steps = true", "must be an integer"),
        ("training", "steps = 10.0", "must be an integer"),
        ("training", "steps = -2", "must be greater than or equal to -1"),
        ("training", "steps = 2024-01-01", "must be an integer"),
        ("training", "steps = []", "must be an integer"),
        ("training", "local_batch_size = 2.5", "must be an integer"),
        ("training", "num_epochs = 0", "must be greater than 0"),
        ("training", "max_norm = nan", "must be greater than 0"),
        ("training", "dataset_path = 3", "item 1: must be a string"),
        ("training", 'dataset_path = ["a", 3]', "item 2: must be a string"),
        ("training", "dataset_weights = [1.0, -2.0]", "item 2: must be greater than 0"),
        ("training", "dataset_weights = [0]", "item 1: must be greater than 0"),
        ("training", "dataset_weights = [true]", "item 1: must be a number"),
        ("training", 'dtype = "Float32"', "did you mean 'float32'?"),
        ("optimizer", 'name = "adamw"', "my_module:NAME; did you mean 'AdamW'?"),
        ("optimizer", 'name = "LBFGS"', "'LBFGS'"),
        ("optimizer", "lr = inf", "must be a finite number"),
        ("optimizer", "lr = true", "must be a number"),
        ("optimizer", "beta1 = 1.0", "must be less than 1"),
        ("metrics", "enable_wandb = 1", "must be true or false"),
        ("metrics", 'enable_wandb = "true"', "must be true or false"),
        ("model", "flavor = 8", "must be a string"),
        ("model", 'flavor = ""', "must not be empty"),
        ("activation_checkpoint", "selective_ac_option = 2", "must be a string"),
        ("training", "steps = 99999999999999999999", "must be at most 1000000000000"),
        ("comm", "train_timeout_seconds = 9999999999999", "must be at most 1000000000000"),
        ("lora", "rank = 9223372036854775808", "must be at most 1000000000000"),
        ("lr_scheduler", "warmup_steps = 1" + "0" * 80, "must be at most 1000000000000"),
        ("job", 'dump_folder = "a\\u0000b"', "NUL (\\u0000)"),
        ("training", 'dataset_path = ["a\\u0000b"]', "NUL (\\u0000)"),
        ("debug", "seed = -1", "must be greater than or equal to 0"),
        ("debug", "seed = 9223372036854775808", "must be less than 9223372036854775808"),
    ],
)
def test_wrong_values(section: str, line: str, rule: str) -> None:
    [mistake] = loaded(f"[{section}]\n{line}").mistakes
    assert mistake.startswith(f"job.toml: [{section}] {line}: ")
    assert mistake.endswith(rule)


def test_values_that_look_odd_and_are_right(jobs: Jobs) -> None:
    config = jobs.load(
        '[training]\nmax_norm = inf\ndataset = "files"\ndataset_path = "one.txt"\n'
        "[optimizer]\nlr = 1\n[debug]\nseed = 9223372036854775807"
    )
    assert config.training.max_norm == float("inf")
    assert config.training.dataset_path == ("one.txt",)
    assert config.optimizer.lr == 1.0
    assert isinstance(config.optimizer.lr, float)
    assert config.debug.seed == 2**63 - 1


def test_a_long_value_is_cut_short(jobs: Jobs) -> None:
    [mistake] = jobs.mistakes("[training]\nsteps = '" + "x" * 500 + "'")
    assert len(mistake) < 200
    assert " ...: must be an integer" in mistake


def test_all_mistakes_come_together(jobs: Jobs) -> None:
    jobs.write("[modle]\nname = 1\n[optimizer]\nlr = -1.0", name="base.toml")
    found = jobs.mistakes(
        'base = "base.toml"\n[training]\nsteps = "ten"\nlocal_batch_size = 2.5\nstepz = 4\n'
        "[memory_estimation]\nenable = true\n[training.dataloader]\npersistent_workers = true\n"
        "[lr_scheduler]\nlr_min = 0.1\nmin_lr_factor = 0.2",
        "--training.seq_len",
        "0",
        "--chekpoint.enable",
    )
    assert {mistake.split(": ")[1].split(" = ")[0] for mistake in found} == {
        "unknown section [modle]; did you mean [model]?",
        "[optimizer] lr",
        "[training] steps",
        "[training] local_batch_size",
        "[training] stepz",
        "[memory_estimation] enable",
        "[training.dataloader] persistent_workers",
        "[lr_scheduler] lr_min",
        "--training.seq_len 0",
        "--chekpoint.enable",
    }
    assert len(found) == 10
