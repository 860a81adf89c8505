"""What a flavor is after the settings of a job, and what the log and the data rule say of both."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.files import alone
from torchtitan.build import build_training_samples, log_job
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.models.families import MODELS, find_model
from torchtitan.models.sizes import DecoderConfig, RopeScaling

FLAVORS = MODELS["llama3"].flavors
STRETCH = ["factor=8.0", "original_max_position=64"]


def found(flavor: str, *options: str, scaling: tuple[str, ...] = ()) -> DecoderConfig:
    """The architecture of a job with these options under [model] and [model.rope_scaling]."""
    words = [f"flavor={flavor}", *options, *(f"rope_scaling.{option}" for option in scaling)]
    return find_model(load_config([f"--model.{word}" for word in words]).model)[1]


def test_a_flavor_stays_as_it_is_unless_something_is_said() -> None:
    assert found("8B") == FLAVORS["8B"]
    assert found("8B", "rope_theta=1e6") == replace(FLAVORS["8B"], rope_theta=1e6)
    assert found("8B", scaling=("type=none",)) == replace(FLAVORS["8B"], rope_scaling=None)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["type=linear", "factor=2.5"], RopeScaling(type="linear", factor=2.5)),
        (
            ["type=llama3", *STRETCH],
            RopeScaling(type="llama3", factor=8.0, original_max_position=64),
        ),
        (
            ["type=llama3", *STRETCH, "low_freq_factor=2.0", "high_freq_factor=3.0"],
            RopeScaling(
                type="llama3",
                factor=8.0,
                original_max_position=64,
                low_freq_factor=2.0,
                high_freq_factor=3.0,
            ),
        ),
        (["type=yarn", *STRETCH], RopeScaling(type="yarn", factor=8.0, original_max_position=64)),
        (
            ["type=yarn", *STRETCH, "beta_fast=8.0", "beta_slow=0.5", "attention_factor=1.25"],
            RopeScaling(
                type="yarn",
                factor=8.0,
                original_max_position=64,
                beta_fast=8.0,
                beta_slow=0.5,
                attention_factor=1.25,
            ),
        ),
    ],
)
def test_each_type_takes_its_keys_and_leaves_the_others_to_the_model(
    options: list[str], expected: object
) -> None:
    for flavor in ("tiny", "8B"):
        architecture = found(flavor, scaling=tuple(options))
        assert architecture == replace(FLAVORS[flavor], rope_scaling=expected)


@pytest.mark.parametrize(
    ("options", "parts"),
    [
        (
            ["type=llama3", "low_freq_factor=4.0"],
            ["--model.rope_scaling.low_freq_factor 4.0", "high_freq_factor", "got 4 and 4"],
        ),
        (
            ["type=yarn", "beta_fast=0.5"],
            ["--model.rope_scaling.beta_fast 0.5", "beta_slow", "got 0.5 and 1"],
        ),
    ],
)
def test_bounds_in_disorder_are_refused(options: list[str], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        found("8B", scaling=(*options, *STRETCH))
    assert all(part in str(error.value) for part in parts), error.value


def logged(caplog: pytest.LogCaptureFixture, *options: str, world_size: int = 1) -> str:
    """What the log says of a job of 4,096 tokens."""
    config = load_config(["--training.seq_len=4096", *options])
    caplog.clear()
    with caplog.at_level(logging.INFO):
        log_job(config, layout=find_layout(config, world_size=world_size), device=CPU)
    return caplog.text


CPU = torch.device("cpu")
YARN = ["--model.rope_scaling.type=yarn", "--model.rope_scaling.original_max_position=512"]


LOCAL, WHOLE = "local_batch_size", "global_batch_size"


@pytest.mark.parametrize(("whole", "keys"), [(-1, [LOCAL]), (4, [LOCAL, WHOLE]), (8, [WHOLE])])
def test_what_makes_the_batch_smaller_is_named(tmp_path: Path, whole: int, keys: list[str]) -> None:
    (tmp_path / "a.txt").write_text("a" * 30)
    config = load_config(
        [
            "--model.tokenizer_path=byte",
            "--training.dataset=files",
            f"--training.dataset_path={tmp_path / 'a.txt'}",
            f"--training.dataset_cache={tmp_path}",
            "--training.seq_len=10",
            "--training.num_epochs=1",
            "--training.local_batch_size=4",
            f"--training.global_batch_size={whole}",
        ]
    )
    layout = find_layout(config, world_size=1)
    with pytest.raises(DataError, match="seq_len") as error:
        build_training_samples(config, layout=layout, once=alone)
    assert error.value.key == f"training.{keys[0]}"
