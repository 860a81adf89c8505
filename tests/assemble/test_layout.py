"""The settings of a job override what a flavor says of its rotary wavelengths, and nothing else."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchtitan.assemble import find_model
from torchtitan.base.errors import ConfigError
from torchtitan.config.load import load_config
from torchtitan.models import MODELS
from torchtitan.models.spec import DecoderConfig, LinearScaling, Llama3Scaling, YarnScaling

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
        (["type=linear", "factor=2.5"], LinearScaling(factor=2.5)),
        (["type=llama3", *STRETCH], Llama3Scaling(factor=8.0, original_max_position=64)),
        (
            ["type=llama3", *STRETCH, "low_freq_factor=2.0", "high_freq_factor=3.0"],
            Llama3Scaling(
                factor=8.0, original_max_position=64, low_freq_factor=2.0, high_freq_factor=3.0
            ),
        ),
        (["type=yarn", *STRETCH], YarnScaling(factor=8.0, original_max_position=64)),
        (
            ["type=yarn", *STRETCH, "beta_fast=8.0", "beta_slow=0.5", "attention_factor=1.25"],
            YarnScaling(
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
    ("options", "message"),
    [
        (
            ["type=llama3", "low_freq_factor=4.0"],
            "high_freq_factor must be greater than low_freq_factor, got 4 and 4",
        ),
        (
            ["type=yarn", "beta_fast=0.5"],
            "beta_fast must be greater than beta_slow, got 0.5 and 1",
        ),
    ],
)
def test_bounds_in_disorder_are_refused(options: list[str], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        found("8B", scaling=(*options, *STRETCH))
    assert f"[model.rope_scaling] {message}" in str(error.value)
