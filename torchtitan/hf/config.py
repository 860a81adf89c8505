"""The sizes of a model as Hugging Face's config.json says them, read and written.

A size that differs is an error even where all shapes agree: another base of the rotation, epsilon
of the norms or number of heads gives a model that loads and is another one. Version 5 of
transformers keeps what belongs to the rotation in `rope_parameters`, version 4 in `rope_theta` and
`rope_scaling`. Both are read; the second is written, since both versions read it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.hf.blocks import stored_blocks
from torchtitan.hf.names import CONFIG
from torchtitan.hf.rope import (
    check_number,
    rope_table,
    stored_scaling,
    their_scaling,
)
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import NO_HF_FILES, HFFormat, ModelSpec

NEEDED = object()


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size of a model in config.json."""

    ours: str
    """What `DecoderConfig` calls it."""
    kind: type = int
    absent: object = NEEDED
    """What transformers takes where it is left out."""


SIZES: Mapping[str, Size] = {
    "hidden_size": Size(ours="dim"),
    "intermediate_size": Size(ours="hidden_dim"),
    "num_hidden_layers": Size(ours="num_layers"),
    "num_attention_heads": Size(ours="num_heads"),
    "num_key_value_heads": Size(ours="num_kv_heads"),  # where left out: as many as heads
    "head_dim": Size(ours="head_dim"),  # where left out: hidden_size / num_attention_heads
    "vocab_size": Size(ours="vocab_size"),
    "rms_norm_eps": Size(ours="norm_eps", kind=float, absent=1e-6),
    "tie_word_embeddings": Size(ours="tie_embeddings", kind=bool, absent=False),
    "rope_theta": Size(ours="rope_theta", kind=float, absent=10_000.0),
    "rope_scaling": Size(ours="rope_scaling", kind=dict, absent=None),
}
"""The sizes of every family by their names in config.json; `HFFormat.more_counts` and
`first_layers` have a family's own."""
SEEN_IN_SHAPES = ("num_hidden_layers", "vocab_size", "tie_word_embeddings")
"""Sizes that say no more than names and shapes of the tensors do."""
NULLABLE = ("sliding_window", "q_lora_rank")
"""Counts for which null is a value of its own."""
CARRIED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""What a model of Hugging Face keeps that our sizes know nothing of."""
LARGEST, MOST_LAYERS = 10**8, 10**4
"""Of counts in a config.json: a model is built by it before any weight is looked at."""
Sizes = dict[str, Any]
"""By the names in config.json, and as they are written there."""


def size_table(format: HFFormat) -> Mapping[str, Size]:
    """Return the sizes that a family's config.json holds."""
    more = {
        key: Size(ours=ours, kind=int if unsaid is None else type(unsaid), absent=unsaid)
        for key, (ours, unsaid) in format.more_counts.items()
    }
    common = {key: size for key, size in SIZES.items() if key not in format.lacks}
    lists = {
        key: Size(ours=ours, kind=list, absent=[]) for key, ours in format.first_layers.items()
    }
    return {**common, **more, **lists}


def sizes_of(architecture: DecoderConfig, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes of a model as its config.json says them."""
    sizes = {key: getattr(architecture, size.ours) for key, size in size_table(format).items()}
    sizes |= {key: list(range(sizes[key] or 0)) for key in format.first_layers}
    sizes |= {key: none for key, none in format.none_as.items() if sizes[key] is None}
    if "head_dim" in sizes:
        sizes["head_dim"] = architecture.head_width
    return {**sizes, "rope_scaling": their_scaling(architecture.rope_scaling)}


def find_unsaid(architecture: DecoderConfig, format: HFFormat) -> str | None:
    """Say which sizes a config.json of the family would not say, all its models having others.

    None: there are no such sizes.
    """
    said = {size.ours for size in size_table(format).values()}
    due = {one.name: format.implied.get(one.name, one.default) for one in fields(architecture)}
    wrong = [
        f"{one.name} is {due[one.name]} there, {value} here"
        for one in fields(architecture)
        if one.name not in said and not one.metadata.get("of_family")
        if (value := getattr(architecture, one.name)) != due[one.name]
    ]
    return f"of a {format.architecture} {'; '.join(wrong)}" if wrong else None


def read_config(folder: Path) -> StoredJSON:
    """Return the config.json of a folder, its counts and other sizes being numbers."""
    content = read_json(folder / CONFIG)
    given = {k: value for k, value in content.items() if value is not None or k in NULLABLE}
    kinds = {
        **{key: size.kind for key, size in SIZES.items() if size.kind is not float},
        "max_position_embeddings": int,
        "rope_parameters": dict,
        **{key: int for key in NULLABLE if given.get(key) is not None},
    }
    config = StoredJSON(content.path, given).check_types(kinds)
    for key, size in SIZES.items():
        if size.kind is float:
            check_number(config, key)
    return config


def stored_sizes(config: StoredJSON, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes that a config.json says, those it leaves out as transformers fills them in.

    `format` adds those of a family.

    Raises:
        CheckpointError: It lacks a size, or stretches the rotation in a way that is not built.
    """
    table, rope = size_table(format), rope_table(config)
    heads = config["num_attention_heads"]
    absent = {key: size.absent for key, size in table.items() if size.absent is not NEEDED}
    absent |= {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // max(heads, 1)}
    given = {format.aliases.get(key, key): value for key, value in config.items()}
    said = StoredJSON(config.path, {**absent, **given})
    own = {key: table[key].kind for key in (*format.more_counts, *format.first_layers)}
    said.check_types({key: k for key, k in own.items() if k is not float and said[key] is not None})
    for key, kind in own.items():
        if kind is float:
            check_number(said, key)
    said["rope_theta"] = rope.get("rope_theta", said["rope_theta"])
    said["rope_scaling"] = their_scaling(stored_scaling(rope))
    return {key: said[key] for key in table}


def check_config(
    config: StoredJSON,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    seen_elsewhere: Collection[str] = (),
) -> None:
    """Refuse a config.json of another model than `architecture`, a size of `spec`.

    `seen_elsewhere` names sizes that may differ.
    """
    check_family(config, format=spec.hf)
    if (unsaid := find_unsaid(architecture, spec.hf)) is not None:
        raise CheckpointError(
            f"{config.path} must be of the sizes of this job, and cannot be: {unsaid}; remove "
            f"these from [model], or take another model"
        )
    stored, ours = stored_sizes(config, spec.hf), sizes_of(architecture, spec.hf)
    different = [k for k in ours if stored[k] != ours[k] and k not in seen_elsewhere]
    if not different:
        return
    grow = "; or checkpoint.grow_vocab = true: the rows behind the stored ones begin anew"
    grows = "vocab_size" in different and stored["vocab_size"] < ours["vocab_size"]
    raise CheckpointError(
        f"{config.path} must have the sizes of this job, got others:\n  "
        + "\n  ".join(f"{k}: {stored[k]} there, {ours[k]} in this job" for k in different)
        + '\nwrite model.flavor = "hf" and no sizes in [model]: they are then the folder\'s'
        + (grow if grows else "")
    )


def family_of(config: StoredJSON, *, models: Mapping[str, ModelSpec]) -> ModelSpec:
    """Return which of the families a config.json is of.

    Raises:
        CheckpointError: It is of none, or has a feature that its family lacks here.
    """
    architectures = config.get("architectures")
    for spec in models.values():
        if architectures == [spec.hf.architecture]:
            check_family(config, format=spec.hf)
            return spec
    raise CheckpointError(
        f"{config.path} must be of a model that is built here, got architectures {architectures} "
        f"not {' or '.join(spec.hf.architecture for spec in models.values() if spec.hf.names)}"
    )


def architecture_of(config: StoredJSON, *, spec: ModelSpec) -> DecoderConfig:
    """Return the model of a config.json, whether or not a flavor has its sizes."""
    sizes, table = stored_sizes(config, spec.hf), size_table(spec.hf)
    counts = {key: sizes[key] for key, size in table.items() if size.kind is int}
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    least = {key: 0 if none == 0 else 1 for key, none in spec.hf.none_as.items()}
    is_odd = any(
        n is not None and not least.get(key, 1) <= n <= LARGEST for key, n in counts.items()
    )
    is_odd = is_odd or heads % kv_heads or sizes.get("head_dim", 0) % 2
    if is_odd or sizes["num_hidden_layers"] > MOST_LAYERS:
        raise CheckpointError(
            f"{config.path} must give counts of 1 and more, up to {MOST_LAYERS} of layers and "
            f"{LARGEST} of the others, a number of heads that its number of key/value heads "
            f"divides, and an even head_dim, got "
            + ", ".join(f"{key} {str(count)[:20]}" for key, count in counts.items())
            + "; get it again"
        )
    ours: dict[str, Any] = {
        # JSON may say 10000 of a float
        size.ours: float(sizes[key]) if size.kind is float else sizes[key]
        for key, size in table.items()
    }
    ours |= {table[key].ours: sizes[key] or None for key in spec.hf.none_as}
    ours |= spec.hf.implied
    ours["rope_scaling"] = stored_scaling(rope_table(config))
    for key, name in spec.hf.first_layers.items():
        if ours[name] != [*range(len(ours[name]))]:
            raise CheckpointError(
                f"{config.path} must list the first few layers under {key}, from 0 on, got "
                f"{str(ours[name])[:60]}; no other order is built: take another model"
            )
        ours[name] = len(ours[name]) or None
    architecture = spec.sizes(**ours, **spec.of_family)
    if wrong := next(architecture.violations(), None):
        raise CheckpointError(f"{config.path} is of no model that can be: {wrong.rule}")
    return architecture


def check_family(config: StoredJSON, *, format: HFFormat) -> None:
    """Refuse a model of another family, or with a feature that ours lacks."""
    if config.get("architectures") != [format.architecture]:
        raise CheckpointError(
            f"{config.path} must be of a {format.architecture}, got architectures "
            f'{config.get("architectures")}; write model.flavor = "hf" and no model.name if its '
            f"family is built, or take another model"
        )
    rope = rope_table(config)
    said = {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0), **config}
    for key, value in format.each_layer.items():
        if isinstance(said.get(key), list):  # the first that differs stands for all
            said[key] = next((kind for kind in said[key] if kind != value), value)
    fixed = {**format.fixed, **format.each_layer}
    fixed |= {"partial_rotary_factor": 1.0}
    stored_blocks(config)
    wrong = [k for k, value in fixed.items() if k in said and said[k] != value]
    if wrong:
        raise CheckpointError(
            f"{config.path} asks for what is not built: "
            + "; ".join(f"{k} = {said[k]!r}, only {fixed[k]!r} is" for k in wrong)
            + "; take a model without it"
        )


def new_config(
    architecture: DecoderConfig,
    *,
    format: HFFormat,
    dtype: torch.dtype,
    carried: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the config.json of a model; `carried` holds what is in `CARRIED`."""
    scaling = architecture.rope_scaling
    context = {}
    if scaling is not None and scaling.type == "yarn":
        # transformers 4.53 stretches by its quotient with the original, and passes the factor over
        context["max_position_embeddings"] = int(scaling.factor * scaling.original_max_position)
    return {
        "architectures": [format.architecture],
        "model_type": format.model_type,
        **{key: value for key, value in format.fixed.items() if value is not None},
        **sizes_of(architecture, format),
        **({format.more_layers: 0} if format.more_layers else {}),
        **carried,
        **context,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
