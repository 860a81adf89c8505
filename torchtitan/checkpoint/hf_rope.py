"""The stretch of the rotation as Hugging Face's config.json says it, read and written.

A key that is passed over gives a model that loads and is another one. So whatever is in the table
and not read here is refused, and a number has to be one.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import Content
from torchtitan.models.rope_scaling import LinearScaling, Llama3Scaling, RopeScaling, YarnScaling

ORIGINAL = "original_max_position_embeddings"
NEEDED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", ORIGINAL, "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", ORIGINAL),
}
"""What each kind cannot be without."""
NUMBERS = (
    *NEEDED["llama3"],
    "beta_fast",
    "beta_slow",
    "attention_factor",
    "rope_theta",
    "partial_rotary_factor",
)
READ = ("rope_type", "type", "truncate", *NUMBERS)
OUR_NAMES = {"rope_type": "type", ORIGINAL: "original_max_position"}
"""Keys of `model.rope_scaling`, where ours are others."""


def rope_table(config: Content) -> Content:
    """Return what a config.json says of the rotation in its table, without what is null there.

    Raises:
        CheckpointError: It says what is not read, or something else where a number belongs.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = Content(config.path, {k: value for k, value in given.items() if value is not None})
    unread = {k: value for k, value in rope.items() if k not in READ}
    if rope.get("truncate", True) is not True:  # whole pairs alone bound yarn's blend
        unread["truncate"] = rope["truncate"]
    if unread:
        raise CheckpointError(
            f"{config.path}: of the rotation only {', '.join(READ)} are read, truncate if it is "
            f"true, got {', '.join(f'{k} = {str(v)[:60]}' for k, v in unread.items())}; take a "
            f"model without it"
        )
    for key in NUMBERS:
        check_number(rope, key)
    return rope


def check_number(content: Content, key: str) -> None:
    """Refuse what is no number under `key`.

    Raises:
        CheckpointError: Names the file and the key.
    """
    # exact: JSON's true is an int to isinstance
    value = content.get(key, 1)
    if type(value) not in (int, float) or not 0 < value < inf:
        raise CheckpointError(
            f"{content.path} is damaged: '{key}' must be a number above 0, got "
            f"{str(content[key])[:60]!r}; get it again"
        )


def stored_scaling(rope: Content) -> RopeScaling | None:
    """Return the stretch that a table tells of.

    Raises:
        CheckpointError: Its kind is not built, or lacks a number, or shrinks the wavelengths.
    """
    kind = rope.get("rope_type", rope.get("type", "default"))
    if not isinstance(kind, str) or kind not in NEEDED:
        raise CheckpointError(
            f"{rope.path}: the rotation must be scaled by linear, llama3 or yarn or not at all, "
            f"got rope_type {kind!r} with {', '.join(rope)}, which is not built; take a model "
            f"without it"
        )
    for key in NEEDED[kind]:
        if key not in rope:
            raise CheckpointError(
                f"{rope.path}: a rotation of rope_type {kind!r} must say its {key!r}, which is "
                f"null or not there; write it into the table of the rotation"
            )
    if kind == "default":
        return None
    if not rope["factor"] >= 1:
        raise CheckpointError(
            f"{rope.path}: 'factor' of the rotation must be 1 or more, got {rope['factor']}; "
            f"write the one that the model was trained with"
        )
    if kind == "linear":
        return LinearScaling(factor=rope["factor"])
    if kind == "llama3":
        return Llama3Scaling(
            factor=rope["factor"],
            low_freq_factor=rope["low_freq_factor"],
            high_freq_factor=rope["high_freq_factor"],
            original_max_position=rope[ORIGINAL],
        )
    return YarnScaling(
        factor=rope["factor"],
        original_max_position=rope[ORIGINAL],
        beta_fast=rope.get("beta_fast", 32.0),
        beta_slow=rope.get("beta_slow", 1.0),
        attention_factor=rope.get("attention_factor"),
    )


def their_scaling(scaling: RopeScaling | None) -> Mapping[str, object] | None:
    """Return the table of a stretch."""
    if scaling is None:
        return None
    factor = {"factor": scaling.factor}
    if isinstance(scaling, LinearScaling):
        return {"rope_type": "linear", **factor}
    factor[ORIGINAL] = scaling.original_max_position
    if isinstance(scaling, Llama3Scaling):
        bounds = {"low_freq_factor": scaling.low_freq_factor}
        return {
            "rope_type": "llama3",
            **factor,
            **bounds,
            "high_freq_factor": scaling.high_freq_factor,
        }
    return {
        "rope_type": "yarn",
        **factor,
        "beta_fast": scaling.beta_fast,
        "beta_slow": scaling.beta_slow,
        "attention_factor": scaling.temperature,
    }
