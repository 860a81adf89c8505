"""The scaling of rotary wavelengths as config.json spells it, read and written by one table.

An ignored key gives a model that loads and is a different one. So every key in the file's table
that is not read here is refused, and numbers must be numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf
from typing import Any

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON
from torchtitan.models.sizes import RopeScaling

ORIGINAL = "original_max_position_embeddings"
OUR_NAMES = {"rope_type": "type", ORIGINAL: "original_max_position"}
"""Keys of `model.rope_scaling` that have another name there."""
_NEEDED = object()
_FACTOR = {"factor": _NEEDED}
_ORIGINAL = {**_FACTOR, ORIGINAL: _NEEDED}
KINDS: Mapping[str, Mapping[str, object]] = {
    "linear": _FACTOR,
    "llama3": {**_ORIGINAL, "low_freq_factor": _NEEDED, "high_freq_factor": _NEEDED},
    "yarn": {
        **_ORIGINAL,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": None,
        "mscale": None,
        "mscale_all_dim": None,
    },
}
"""The keys of each type with their defaults. They are fields of `RopeScaling` but for `OUR_NAMES`.
"""
NUMBERS = (
    *dict.fromkeys(key for keys in KINDS.values() for key in keys),
    "rope_theta",
    "partial_rotary_factor",
)
READ = ("rope_type", "type", "truncate", *NUMBERS)


def rope_table(config: StoredJSON) -> StoredJSON:
    """Return the table of the rotation in a config.json, without its nulls.

    Raises:
        CheckpointError: It has a key that is not read, or a value that is not a number.
    """
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = StoredJSON(config.path, {k: value for k, value in given.items() if value is not None})
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


def check_number(content: StoredJSON, key: str) -> None:
    """Refuse a value under `key` that is not a positive number."""
    # exact: JSON's true is an int to isinstance
    value = content.get(key, 1)
    if type(value) not in (int, float) or not 0 < value < inf:
        raise CheckpointError(
            f"{content.path} is damaged: '{key}' must be a number above 0, got "
            f"{str(content[key])[:60]!r}; get it again"
        )


def stored_scaling(rope: StoredJSON) -> RopeScaling | None:
    """Return the scaling that a table describes; None: there is none."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if not isinstance(kind, str) or kind not in KINDS:
        raise CheckpointError(
            f"{rope.path}: the rotation must be scaled by {', '.join(KINDS)} or not at all, got "
            f"rope_type {kind!r} with {', '.join(rope)}, which is not built; take a model without "
            f"it"
        )
    values: dict[str, Any] = {key: rope.get(key, default) for key, default in KINDS[kind].items()}
    for key, value in values.items():
        if value is _NEEDED:
            raise CheckpointError(
                f"{rope.path}: a rotation of rope_type {kind!r} must have {key!r}, which is null "
                f"or not there; write it into the table of the rotation"
            )
    if not values["factor"] >= 1:
        raise CheckpointError(
            f"{rope.path}: 'factor' of the rotation must be 1 or more, got {rope['factor']}; "
            f"write the one that the model was trained with"
        )
    return RopeScaling(type=kind, **{OUR_NAMES.get(k, k): value for k, value in values.items()})


def their_scaling(scaling: RopeScaling | None) -> Mapping[str, object] | None:
    """Return the table of a scaling."""
    if scaling is None:
        return None
    values = {key: getattr(scaling, OUR_NAMES.get(key, key)) for key in KINDS[scaling.type]}
    if scaling.type == "yarn":
        values["attention_factor"] = scaling.temperature  # where none is set, what follows
    return {
        "rope_type": scaling.type,
        **{k: value for k, value in values.items() if value is not None},
    }
