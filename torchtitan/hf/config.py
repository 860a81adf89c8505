"""The sizes of a model as Hugging Face's config.json says them, read and written.

A size that differs is an error even where all shapes agree: another base of the rotation, epsilon
of the norms or number of heads gives a model that loads and is another one. Version 5 of
transformers keeps what belongs to the rotation in `rope_parameters`, version 4 in `rope_theta` and
`rope_scaling`. Both are read; the second is written, since both versions read it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import Content, checked_kinds, read_json
from torchtitan.hf.names import CONFIG
from torchtitan.hf.rope import (
    OUR_NAMES,
    check_number,
    rope_table,
    stored_scaling,
    their_scaling,
)
from torchtitan.models.rope_scaling import YarnScaling
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import NO_HF_FILES, HFFormat, ModelSpec

COUNTS = {
    "hidden_size": "dim",
    "intermediate_size": "hidden_dim",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
}
"""Sizes that are whole numbers, and what they are called in `DecoderConfig`."""
SEEN_IN_SHAPES = ("num_hidden_layers", "vocab_size", "tie_word_embeddings")
"""Sizes that say no more than names and shapes of the tensors do."""
NULLABLE = ("sliding_window",)
"""Counts for which null is a value of its own."""
ROTATION = ("rope_theta", "rope_scaling")
"""Sizes that a job may set beside its flavor."""
CARRIED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""What a model of Hugging Face keeps that our sizes know nothing of."""
LARGEST, MOST_LAYERS = 10**8, 10**4
"""Of counts in a config.json: a model is built by it before any weight is looked at."""
Sizes = dict[str, object]


def sizes_of(architecture: DecoderConfig, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes of a model by their names in config.json, with those that a family adds."""
    return {
        "hidden_size": architecture.dim,
        "intermediate_size": architecture.hidden_dim,
        "num_hidden_layers": architecture.num_layers,
        "num_attention_heads": architecture.num_heads,
        "num_key_value_heads": architecture.num_kv_heads,
        "head_dim": architecture.head_width,
        "vocab_size": architecture.vocab_size,
        "rms_norm_eps": architecture.norm_eps,
        "tie_word_embeddings": architecture.tie_embeddings,
        "rope_theta": architecture.rope_theta,
        "rope_scaling": their_scaling(architecture.rope_scaling),
        **{key: getattr(architecture, ours) for key, (ours, _) in format.more_counts.items()},
    }


def read_config(folder: Path) -> Content:
    """Return the config.json of a folder, its counts and other sizes being numbers.

    Raises:
        CheckpointError: It is missing, or no JSON, or holds something else where a number belongs.
    """
    content = read_json(folder / CONFIG)
    given = {k: value for k, value in content.items() if value is not None or k in NULLABLE}
    kinds = {
        **dict.fromkeys(COUNTS, int),
        "max_position_embeddings": int,
        "tie_word_embeddings": bool,
        "rope_parameters": dict,
        "rope_scaling": dict,
        **{key: int for key in NULLABLE if given.get(key) is not None},
    }
    config = checked_kinds(Content(content.path, given), kinds=kinds)
    for key in ("rope_theta", "rms_norm_eps"):
        check_number(config, key)
    return config


def stored_sizes(config: Content, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes that a config.json says, those it leaves out as transformers fills them in.

    `format` adds those of a family.

    Raises:
        CheckpointError: It lacks a size, or stretches the rotation in a way that is not built.
    """
    heads = config["num_attention_heads"]
    rope = rope_table(config)
    return {
        "hidden_size": config["hidden_size"],
        "intermediate_size": config["intermediate_size"],
        "num_hidden_layers": config["num_hidden_layers"],
        "num_attention_heads": heads,
        "num_key_value_heads": config.get("num_key_value_heads", heads),
        "head_dim": config.get("head_dim", config["hidden_size"] // max(heads, 1)),
        "vocab_size": config["vocab_size"],
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "tie_word_embeddings": config.get("tie_word_embeddings", False),
        "rope_theta": rope.get("rope_theta", config.get("rope_theta", 10_000.0)),
        "rope_scaling": their_scaling(stored_scaling(rope)),
        **{key: config.get(key, unsaid) for key, (_, unsaid) in format.more_counts.items()},
    }


def check_config(
    config: Content,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    seen_elsewhere: Collection[str] = (),
) -> None:
    """Refuse a config.json of another model than `architecture`, a size of `spec`.

    `seen_elsewhere` names sizes that may differ.

    Raises:
        CheckpointError: Names all that differs, and the flavor and settings that fit, if any do.
    """
    check_family(config, format=spec.hf)
    stored, ours = stored_sizes(config, spec.hf), sizes_of(architecture, spec.hf)
    different = [k for k in ours if stored[k] != ours[k] and k not in seen_elsewhere]
    if not different:
        return
    raise CheckpointError(
        f"{config.path} must have the sizes of model.flavor, got others:\n  "
        + "\n  ".join(f"{k}: {stored[k]} there, {ours[k]} in this job" for k in different)
        + f"\n{_remedy(config, spec=spec, different=different, rows=architecture.vocab_size)}"
    )


def _remedy(config: Content, *, spec: ModelSpec, different: list[str], rows: int) -> str:
    beside = (*ROTATION, "vocab_size")  # what a job may set beside its flavor
    settings = {name for name in different if name in beside}
    flavor = []
    if len(settings) < len(different):
        fitting = (
            fitting_flavors(config, spec=spec, passed_over=p) for p in ((), ROTATION, beside)
        )
        best = next((names[0] for names in fitting if names), None)
        if best is None:
            return (
                f"no flavor of {spec.name} has these sizes ({', '.join(spec.flavors)}): add one to "
                f"torchtitan/models/{spec.name}.py"
            )
        stored, named = stored_sizes(config, spec.hf), sizes_of(spec.flavors[best], spec.hf)
        settings = {name for name in beside if stored[name] != named[name]}
        flavor = [f'model.flavor = "{best}"']
    vocabulary = [f"model.vocab_size = {config['vocab_size']}"] if "vocab_size" in settings else []
    rotation = rotation_settings(config) if settings.intersection(ROTATION) else []
    grows = "vocab_size" in different and not flavor and config["vocab_size"] < rows
    grow = "; or checkpoint.grow_vocab = true: the rows behind the stored ones begin anew"
    return "write " + ", ".join([*flavor, *vocabulary, *rotation]) + (grow if grows else "")


def rotation_settings(config: Content) -> list[str]:
    """Return the settings of a job that give it the rotation of a config.json."""
    sizes = stored_sizes(config)
    scaling = sizes["rope_scaling"] or {"rope_type": "none"}
    assert isinstance(scaling, Mapping)
    return [
        f"model.rope_theta = {sizes['rope_theta']}",
        *(
            f"model.rope_scaling.{OUR_NAMES.get(k, k)} = {json.dumps(value)}"
            for k, value in scaling.items()
        ),
    ]


def fitting_flavors(
    config: Content, *, spec: ModelSpec, passed_over: Collection[str] = ()
) -> list[str]:
    """Return the flavors of a family that have the sizes of a config.json, but for some."""
    sizes = stored_sizes(config, spec.hf)
    return [
        name
        for name, flavor in spec.flavors.items()
        if all(
            sizes[k] == ours or k in passed_over for k, ours in sizes_of(flavor, spec.hf).items()
        )
    ]


def with_rotation(architecture: DecoderConfig, config: Content) -> DecoderConfig:
    """Return the model with the rotation of a config.json in place of its own."""
    theta = stored_sizes(config)["rope_theta"]
    assert isinstance(theta, int | float)
    return replace(
        architecture, rope_theta=float(theta), rope_scaling=stored_scaling(rope_table(config))
    )


def family_of(config: Content, *, models: Mapping[str, ModelSpec]) -> ModelSpec:
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


def architecture_of(config: Content, *, spec: ModelSpec) -> DecoderConfig:
    """Return the model of a config.json, whether or not a flavor has its sizes.

    Raises:
        CheckpointError: The sizes make no model.
    """
    sizes = stored_sizes(config, spec.hf)
    counts: dict[str, Any] = {ours: sizes[theirs] for theirs, ours in COUNTS.items()}
    more: dict[str, Any] = {ours: sizes[key] for key, (ours, _) in spec.hf.more_counts.items()}
    num_heads, num_kv_heads = counts["num_heads"], counts["num_kv_heads"]
    is_odd = any(n is not None and n < 1 for n in [*counts.values(), *more.values()])
    is_odd = is_odd or num_heads % num_kv_heads or counts["head_dim"] % 2
    if is_odd or max(counts.values()) > LARGEST or counts["num_layers"] > MOST_LAYERS:
        raise CheckpointError(
            f"{config.path} must give counts of 1 and more, up to {MOST_LAYERS} of layers and "
            f"{LARGEST} of the others, a number of heads that its number of key/value heads "
            f"divides, and an even head_dim, got "
            + ", ".join(f"{key} {str(sizes[key])[:20]}" for key in [*COUNTS, *spec.hf.more_counts])
            + "; get it again"
        )
    others: dict[str, Any] = {
        "norm_eps": sizes["rms_norm_eps"],
        "tie_embeddings": sizes["tie_word_embeddings"],
    }
    any_size = next(iter(spec.flavors.values()))  # for what all sizes of the family share
    return with_rotation(replace(any_size, **counts, **more, **others), config)


def check_family(config: Content, *, format: HFFormat) -> None:
    """Refuse a model of another family, or with a feature that ours lacks.

    Raises:
        CheckpointError: Names each feature.
    """
    if config.get("architectures") != [format.architecture]:
        raise CheckpointError(
            f"{config.path} must be of a {format.architecture}, got architectures "
            f"{config.get('architectures')}; set model.name to its family if that is built, or "
            f"take another model"
        )
    rope = rope_table(config)
    said = {"partial_rotary_factor": rope.get("partial_rotary_factor", 1.0), **config}
    for key, value in format.each_layer.items():
        if isinstance(said.get(key), list):  # the first that differs stands for all
            said[key] = next((kind for kind in said[key] if kind != value), value)
    fixed = {**format.fixed, **format.each_layer}
    fixed |= {"quantization_config": None, "partial_rotary_factor": 1.0}
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
    if isinstance(scaling, YarnScaling):
        # transformers 4.53 stretches by its quotient with the original, and passes the factor over
        context["max_position_embeddings"] = int(scaling.factor * scaling.original_max_position)
    return {
        "architectures": [format.architecture],
        "model_type": format.model_type,
        **{key: value for key, value in format.fixed.items() if value is not None},
        **sizes_of(architecture, format),
        **carried,
        **context,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
