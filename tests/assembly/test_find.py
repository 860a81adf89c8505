"""What a flavor is after the settings of a job, and what the log and the data rule say of both."""

from __future__ import annotations

from dataclasses import replace

import pytest

from torchtitan.job import load_config
from torchtitan.models.families import MODELS, find_model
from torchtitan.models.sizes import DecoderConfig, RopeScaling

FLAVORS = MODELS["llama3"].flavors
STRETCH = ["factor=8.0", "original_max_position=64"]


def found(flavor: str, *options: str, scaling: tuple[str, ...] = ()) -> DecoderConfig:
    """The architecture of a job with these options under [model] and [model.rope_scaling]."""
    words = [f"flavor={flavor}", *options, *(f"rope_scaling.{option}" for option in scaling)]
    return find_model(load_config([f"--model.{word}" for word in words]).model)[1]


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
