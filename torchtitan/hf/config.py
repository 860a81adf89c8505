"""The sizes of a model as Hugging Face's config.json says them, read and written.

A size that differs is an error even where all shapes agree: another base of the rotation, epsilon
of the norms or number of heads gives a model that loads and is another one. Version 5 of
transformers keeps what belongs to the rotation in `rope_parameters`, version 4 in `rope_theta` and
`rope_scaling`. Both are read; the second is written, since both versions read it.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
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
from torchtitan.models.spec import NO_HF_FILES, DecoderConfig, HFFormat, ModelSpec

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
"""The sizes of every family by their names in config.json; `HFFormat.more_counts` has a family's
own."""
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
Sizes = dict[str, Any]
"""By the names in config.json, and as they are written there."""


def size_table(format: HFFormat) -> Mapping[str, Size]:
    """Return the sizes that a family's config.json holds."""
    more = {key: Size(ours=o, absent=unsaid) for key, (o, unsaid) in format.more_counts.items()}
    return {**SIZES, **more}


def sizes_of(architecture: DecoderConfig, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes of a model as its config.json says them."""
    sizes = {key: getattr(architecture, size.ours) for key, size in size_table(format).items()}
    return {**sizes, "rope_scaling": their_scaling(architecture.rope_scaling)}


def read_config(folder: Path) -> Content:
    """Return the config.json of a folder, its counts and other sizes being numbers."""
    content = read_json(folder / CONFIG)
    given = {k: value for k, value in content.items() if value is not None or k in NULLABLE}
    kinds = {
        **{key: size.kind for key, size in SIZES.items() if size.kind is not float},
        "max_position_embeddings": int,
        "rope_parameters": dict,
        **{key: int for key in NULLABLE if given.get(key) is not None},
    }
    config = checked_kinds(Content(content.path, given), kinds=kinds)
    for key, size in SIZES.items():
        if size.kind is float:
            check_number(config, key)
    return config


def stored_sizes(config: Content, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes that a config.json says, those it leaves out as transformers fills them in.

    `format` adds those of a family.

    Raises:
        CheckpointError: It lacks a size, or stretches the rotation in a way that is not built.
    """
    table, rope = size_table(format), rope_table(config)
    heads = config["num_attention_heads"]
    absent = {key: size.absent for key, size in table.items() if size.absent is not NEEDED}
    absent |= {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // max(heads, 1)}
    said = Content(config.path, {**absent, **config})
    said["rope_theta"] = rope.get("rope_theta", said["rope_theta"])
    said["rope_scaling"] = their_scaling(stored_scaling(rope))
    return {key: said[key] for key in table}


def check_config(
    config: Content,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    seen_elsewhere: Collection[str] = (),
) -> None:
    """Refuse a config.json of another model than `architecture`, a size of `spec`.

    `seen_elsewhere` names sizes that may differ.
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
    """Return the model of a config.json, whether or not a flavor has its sizes."""
    sizes, table = stored_sizes(config, spec.hf), size_table(spec.hf)
    counts = {key: sizes[key] for key, size in table.items() if size.kind is int}
    heads, kv_heads = sizes["num_attention_heads"], sizes["num_key_value_heads"]
    is_odd = any(n is not None and not 1 <= n <= LARGEST for n in counts.values())
    is_odd = is_odd or heads % kv_heads or sizes["head_dim"] % 2
    if is_odd or sizes["num_hidden_layers"] > MOST_LAYERS:
        raise CheckpointError(
            f"{config.path} must give counts of 1 and more, up to {MOST_LAYERS} of layers and "
            f"{LARGEST} of the others, a number of heads that its number of key/value heads "
            f"divides, and an even head_dim, got "
            + ", ".join(f"{key} {str(count)[:20]}" for key, count in counts.items())
            + "; get it again"
        )
    ours = {size.ours: sizes[key] for key, size in table.items()}
    ours["own_head_dim"] = ours.pop("head_dim")
    ours["rope_theta"] = float(ours["rope_theta"])  # JSON may say 10000
    ours["rope_scaling"] = stored_scaling(rope_table(config))
    any_size = next(iter(spec.flavors.values()))  # for what all sizes of the family share
    return replace(any_size, **ours)


def check_family(config: Content, *, format: HFFormat) -> None:
    """Refuse a model of another family, or with a feature that ours lacks."""
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
