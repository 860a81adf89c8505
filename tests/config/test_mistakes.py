"""Wrong names and wrong values in files: each message, and all of them together."""

from __future__ import annotations

import pytest

from tests.config.jobs import Jobs, loaded
from torchtitan.job import Config


@pytest.mark.parametrize(
    ("text", "place", "meant"),
    [
        ("[optimizer]\nlrr = 1.0", "[optimizer] lrr = 1.0", "[optimizer] lr?"),
        ("[model]\nsteps = 5", "[model] steps = 5", "[training] steps?"),
        ("[trainning]\nsteps = 5", "unknown section [trainning]", "[training]?"),
        ("[trainning]", "unknown section [trainning]", "[training]?"),
        ("steps = 5", "steps = 5", "[training] steps?"),
        ("training = 5", "training = 5", "[training] key ..."),
        ("[[training]]\nsteps = 5", "training = [{steps = 5}]", "[training] key ..."),
        ("[training.steps]\nx = 5", "[training.steps] x = 5", "a table"),
        ("[debug]\nxyzzy = 1", "[debug] xyzzy = 1", "deterministic, "),
        ("[job]\nconfig_file = 'x'", '[job] config_file = "x"', 'base = "other.toml"'),
        ("[optimizer.groups]\nlr = 1", "[optimizer.groups] lr = 1", "[optimizer] groups"),
    ],
)
def test_wrong_names(text: str, place: str, meant: str) -> None:
    [mistake] = loaded(text).mistakes
    assert mistake.startswith(f"job.toml: {place}")
    assert meant in mistake


@pytest.mark.parametrize("text", ["[training]", "[quantize]", "[quantize.linear]", "[profiling]"])
def test_empty_known_tables_load(text: str) -> None:
    assert loaded(text).checked() == Config()


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
    assert "x ...: " in mistake


@pytest.mark.promise("mistakes")
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
        "--chekpoint.enable true",
    }
    assert len(found) == 10
