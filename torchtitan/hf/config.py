"""Read and write the sizes of a model in Hugging Face's config.json.

A model with another rope base, norm epsilon or number of heads often loads without an error, as all
shapes agree. So every size is compared, and a key or value without support is an error.

transformers 5 stores the rotary embedding in `rope_parameters`, version 4 in `rope_theta` and
`rope_scaling`. Both forms are read. Version 4's form is written, because both versions read it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import CheckpointError
from torchtitan.base.stored_json import StoredJSON, read_json
from torchtitan.hf.names import CONFIG
from torchtitan.models.sizes import ROPE_KEYS, DecoderConfig, RopeScaling
from torchtitan.models.spec import NO_HF_FILES, HFFormat, ModelSpec

logger = logging.getLogger(__name__)
_REQUIRED = object()


@dataclass(frozen=True, kw_only=True)
class Size:
    """One size in config.json."""

    field: str
    """Field of `DecoderConfig`."""
    value_type: type = int
    default: object = _REQUIRED
    """Value that transformers uses if the key is missing."""


SIZES: Mapping[str, Size] = {
    "hidden_size": Size(field="dim"),
    "intermediate_size": Size(field="hidden_dim"),
    "num_hidden_layers": Size(field="num_layers"),
    "num_attention_heads": Size(field="num_heads"),
    "num_key_value_heads": Size(field="num_kv_heads"),  # default: num_attention_heads
    "head_dim": Size(field="head_dim"),  # default: hidden_size / num_attention_heads
    "vocab_size": Size(field="vocab_size"),
    "rms_norm_eps": Size(field="norm_eps", value_type=float, default=1e-6),
    "tie_word_embeddings": Size(field="tie_embeddings", value_type=bool, default=False),
    "rope_theta": Size(field="rope_theta", value_type=float, default=10_000.0),
    "rope_scaling": Size(field="rope_scaling", value_type=dict, default=None),
}
"""Sizes that all families share. `HFFormat` adds the sizes of a family."""
VISIBLE_IN_SHAPES = ("num_hidden_layers", "vocab_size", "tie_word_embeddings")
"""Sizes that the names and shapes of the tensors determine."""
NULLABLE = ("sliding_window", "q_lora_rank")
"""Counts that may be null; for other keys null means the default."""
CARRIED = ("max_position_embeddings", "bos_token_id", "eos_token_id", "pad_token_id")
"""Keys that are not sizes and that an export has with or without a base model."""
OURS = frozenset(
    {
        "architectures",
        "model_type",
        "dtype",
        "torch_dtype",
        "use_cache",
        "rope_parameters",
        "original_max_position_embeddings",
        "quantization_config",
        "compression_config",
        "pruned_heads",
        "transformers_version",
    }
)
"""Keys beside the sizes that describe the file that is written, not the base model's."""
NAMES_CODE = frozenset(
    {"auto_map", "custom_pipelines", "attn_implementation", "experts_implementation"}
)
"""Keys that make transformers load code from other places."""
MAX_COUNT, MAX_LAYERS = 10**8, 10**4
"""Limits of counts in a file, because the model is built before its weights are read."""
Sizes = dict[str, Any]
"""Values by their keys in config.json."""


def size_table(format: HFFormat) -> Mapping[str, Size]:
    """Return the sizes in a family's config.json by key."""
    table = {key: size for key, size in SIZES.items() if key not in format.lacks}
    for key, (field, default) in format.more_counts.items():
        value_type = int if default is None else type(default)
        table[key] = Size(field=field, value_type=value_type, default=default)
    for key, field in format.first_layers.items():
        table[key] = Size(field=field, value_type=list, default=[])
    return table


def sizes_of(architecture: DecoderConfig, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes of a model as its config.json stores them."""
    sizes = {key: getattr(architecture, size.field) for key, size in size_table(format).items()}
    sizes |= {key: list(range(sizes[key] or 0)) for key in format.first_layers}
    sizes |= {key: none for key, none in format.none_as.items() if sizes[key] is None}
    if "head_dim" in sizes:
        sizes["head_dim"] = architecture.head_width
    return {**sizes, "rope_scaling": scaling_table(architecture.rope_scaling)}


def find_inexpressible(architecture: DecoderConfig, format: HFFormat) -> str | None:
    """Describe the sizes that a config.json of the family cannot store.

    Returns:
        None if it stores all sizes that differ from the family's constants.
    """
    stored = {size.field for size in size_table(format).values()}
    wrong = []
    for entry in fields(architecture):
        value, constant = (
            getattr(architecture, entry.name),
            format.implied.get(entry.name, entry.default),
        )
        if entry.name not in stored and not entry.metadata.get("of_family") and value != constant:
            wrong.append(f"{entry.name} must be {constant}, got {value}")
    return f"in a {format.architecture} {'; '.join(wrong)}" if wrong else None


def read_config(folder: Path) -> StoredJSON:
    """Return the config.json of a folder without its nulls; check the types of common keys.

    Raises:
        CheckpointError: The file is missing or damaged.
    """
    content = read_json(folder / CONFIG)
    values_in_file = {
        k: value for k, value in content.items() if value is not None or k in NULLABLE
    }
    types = {key: size.value_type for key, size in SIZES.items()}
    types |= {"max_position_embeddings": int, "rope_parameters": dict}
    types |= {key: int for key in NULLABLE if values_in_file.get(key) is not None}
    config = StoredJSON(content.path, values_in_file)
    _check_types(config, types)
    return config


def stored_sizes(config: StoredJSON, format: HFFormat = NO_HF_FILES) -> Sizes:
    """Return the sizes in a config.json, with transformers' defaults for missing keys.

    Raises:
        CheckpointError: A size is missing or has a wrong type, or the rope scaling is unsupported.
    """
    table, rope = size_table(format), rope_table(config)
    heads = config["num_attention_heads"]
    defaults = {key: size.default for key, size in table.items() if size.default is not _REQUIRED}
    defaults |= {"num_key_value_heads": heads, "head_dim": config["hidden_size"] // max(heads, 1)}
    values_in_file = {format.aliases.get(key, key): value for key, value in config.items()}
    sizes = StoredJSON(config.path, {**defaults, **values_in_file})
    of_family = (*format.more_counts, *format.first_layers)
    _check_types(sizes, {key: table[key].value_type for key in of_family if sizes[key] is not None})
    sizes["rope_theta"] = rope.get("rope_theta", sizes["rope_theta"])
    sizes["rope_scaling"] = scaling_table(read_scaling(rope))
    return {key: sizes[key] for key in table}


def family_of(config: StoredJSON, *, models: Mapping[str, ModelSpec]) -> ModelSpec:
    """Return the family of a config.json.

    Raises:
        CheckpointError: The architecture or one of its options is unsupported.
    """
    for spec in models.values():
        if config.get("architectures") == [spec.hf.architecture]:
            check_family(config, format=spec.hf)
            return spec
    families = ", ".join(spec.hf.architecture for spec in models.values() if spec.hf.names)
    raise CheckpointError(
        f"{config.path}: architectures must be one of {families}, got "
        f"{config.get('architectures')!r:.200}"
    )


def check_family(config: StoredJSON, *, format: HFFormat) -> None:
    """Raise CheckpointError if the architecture is another one, or has an unsupported option."""
    if config.get("architectures") != [format.architecture]:
        raise CheckpointError(
            f'{config.path}: architectures must be ["{format.architecture}"], got '
            f'{config.get("architectures")}; set model.flavor = "hf" without model.name'
        )
    find_quantization(config)
    values_in_file = {"partial_rotary_factor": rope_table(config).get("partial_rotary_factor", 1.0)}
    values_in_file |= config
    for key, value in format.each_layer.items():
        if isinstance(values_in_file.get(key), list):
            values_in_file[key] = next(
                (value_type for value_type in values_in_file[key] if value_type != value), value
            )
    supported = {**format.fixed, **format.each_layer, "partial_rotary_factor": 1.0}
    wrong = [
        key
        for key, value in supported.items()
        if key in values_in_file and values_in_file[key] != value
    ]
    if wrong:
        raise CheckpointError(
            f"{config.path} has unsupported options: "
            + "; ".join(
                f"{k} must be {supported[k]!r}, got {values_in_file[k]!r:.80}" for k in wrong
            )
        )


def check_sizes(
    config: StoredJSON,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    may_differ: Collection[str] = (),
) -> None:
    """Raise CheckpointError if a size differs from the model's, except the keys `may_differ`."""
    check_family(config, format=spec.hf)
    if (problem := find_inexpressible(architecture, spec.hf)) is not None:
        raise CheckpointError(f"{config.path} cannot have the sizes of this job: {problem}")
    stored, expected = stored_sizes(config, spec.hf), sizes_of(architecture, spec.hf)
    wrong = [k for k in expected if stored[k] != expected[k] and k not in may_differ]
    if not wrong:
        return
    raise CheckpointError(
        f"{config.path} has other sizes than this job:\n  "
        + "\n  ".join(
            f"{k}: {stored[k]!r:.80} in the file, {expected[k]!r} in this job" for k in wrong
        )
        + '\nto use the sizes in the file set model.flavor = "hf" and no sizes in [model]'
    )


def architecture_of(config: StoredJSON, *, spec: ModelSpec) -> DecoderConfig:
    """Return the sizes in a config.json of the family `spec`.

    Raises:
        CheckpointError: A size is missing or impossible.
    """
    format = spec.hf
    sizes, table = stored_sizes(config, format), size_table(format)
    for key in (key for key, size in table.items() if size.value_type is int):
        least = 0 if format.none_as.get(key) == 0 else 1
        most = MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT
        if sizes[key] is not None and not least <= sizes[key] <= most:
            rule = f"must be from {least} to {most}, got {str(sizes[key])[:20]}"
            raise CheckpointError(f"{config.path}: {key} {rule}")
    values: dict[str, Any] = {}
    for key, size in table.items():
        value = sizes[key]
        if key in format.first_layers:
            if value != [*range(len(value))]:
                raise CheckpointError(
                    f"{config.path}: {key} must list the first layers, 0, 1, ..., got {value!r:.60}"
                )
            value = len(value) or None
        elif key in format.none_as:
            value = value or None
        values[size.field] = (
            float(value) if size.value_type is float else value
        )  # JSON may have 10000
    values |= {**format.implied, "rope_scaling": read_scaling(rope_table(config))}
    architecture = spec.sizes(**values, **spec.of_family)
    if wrong := next(architecture.violations(), None):
        raise CheckpointError(f"{config.path} has impossible sizes: {wrong}")
    return architecture


def new_config(
    architecture: DecoderConfig,
    *,
    format: HFFormat,
    dtype: torch.dtype,
    carried: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the config.json of a model; `carried` has its other keys, see `find_carried`."""
    scaling = architecture.rope_scaling
    context = {}
    if scaling is not None and scaling.type == "yarn":
        # transformers 4.53 ignores the factor and divides this by the original context
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


def find_carried(
    base: Path | None, *, format: HFFormat, seq_len: int, eos_id: int
) -> dict[str, Any]:
    """Return the keys of an export's config.json that are neither sizes nor `OURS`.

    Args:
        base: Folder of the base model, whose keys are kept, without those that name code to load.
            None if the run starts from scratch.
        format: Family of the model.
        seq_len: Sequence length of the run: the least context length.
        eos_id: End token, unless the base has one.
    """
    carried: dict[str, Any] = dict.fromkeys(CARRIED)
    carried |= {"max_position_embeddings": seq_len, "eos_token_id": eos_id}
    if base is None:
        return carried
    if not (base / CONFIG).is_file():
        logger.warning("%s is missing: its token ids and context length are not exported", base)
        return carried
    ours = {*OURS, *size_table(format), *format.fixed, *format.each_layer, *format.aliases}
    kept = {k: v for k, v in read_config(base).items() if k not in {*ours, format.more_layers}}
    if refused := [key for key, value in kept.items() if _names_code(key, value)]:
        logger.info(
            "%s: not exported, as they name code to load: %s", base / CONFIG, ", ".join(refused)
        )
    carried |= {key: value for key, value in kept.items() if key not in refused}
    carried["max_position_embeddings"] = max(seq_len, carried["max_position_embeddings"])
    return carried


def _names_code(key: str, value: object) -> bool:
    """Return whether a key, or one inside its value, may name code to load."""
    inner: Iterable[tuple[str, object]] = ()
    if isinstance(value, dict | list):
        inner = value.items() if isinstance(value, dict) else (("", item) for item in value)
    return (
        key in NAMES_CODE
        or key.startswith("_")
        or any(_names_code(name, item) for name, item in inner)
    )


def find_quantization(config: StoredJSON) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale; None if weights have no scales.

    Raises:
        CheckpointError: The weights are quantized in an unsupported way.
    """
    table = config.get("quantization_config")
    if table is None:
        return None
    match table:
        case {"quant_method": "fp8", "weight_block_size": [rows, cols]} if table.get(
            "fmt", "e4m3"
        ) == "e4m3" and all(type(n) is int and n > 0 for n in (rows, cols)):
            return rows, cols
    raise CheckpointError(
        f"{config.path}: quantization_config must have quant_method fp8 and a weight_block_size of "
        f"two counts, got {table!r:.80}"
    )


ORIGINAL = "original_max_position_embeddings"


def _rope_key(name: str) -> str:
    """Return the key of a field of `RopeScaling`."""
    return ORIGINAL if name == "original_max_position" else name


_ROPE_REQUIRED = ("factor", "original_max_position", "low_freq_factor", "high_freq_factor")
_ROPE_NUMBERS = (
    *dict.fromkeys(_rope_key(name) for names in ROPE_KEYS.values() for name in names),
    "rope_theta",
    "partial_rotary_factor",
)
_ROPE_READ = ("rope_type", "type", "truncate", *_ROPE_NUMBERS)


def rope_table(config: StoredJSON) -> StoredJSON:
    """Return the settings of the rotary embedding in a config.json, without nulls.

    Raises:
        CheckpointError: A key is unsupported, or a value is not a positive number.
    """
    values_in_file = config.get("rope_parameters") or config.get("rope_scaling") or {}
    rope = StoredJSON(
        config.path, {k: value for k, value in values_in_file.items() if value is not None}
    )
    unread = [key for key in rope if key not in _ROPE_READ]
    if rope.get("truncate", True) is not True:  # yarn's ramp starts and ends at full pairs only
        unread.append("truncate")
    if unread:
        raise CheckpointError(
            f"{config.path} has unsupported rope settings: "
            + ", ".join(f"{key} = {rope[key]!r:.60}" for key in unread)
        )
    _check_types(rope, dict.fromkeys(_ROPE_NUMBERS, float))
    return rope


def read_scaling(rope: StoredJSON) -> RopeScaling | None:
    """Return the scaling in the table of a rotary embedding, None if it has none.

    Raises:
        CheckpointError: The type is unsupported, or a key is missing.
    """
    rope_type = rope.get("rope_type", rope.get("type", "default"))
    if rope_type == "default":
        return None
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise CheckpointError(
            f"{rope.path}: rope_type must be default, {' or '.join(ROPE_KEYS)}, got "
            f"{rope_type!r:.60}"
        )
    values = {name: rope.get(_rope_key(name)) for name in ROPE_KEYS[rope_type]}
    missing = [name for name, value in values.items() if value is None and name in _ROPE_REQUIRED]
    if missing:
        raise CheckpointError(
            f"{rope.path}: rope_type {rope_type!r:.60} needs {_rope_key(missing[0])!r}"
        )
    if not rope["factor"] >= 1:
        raise CheckpointError(f"{rope.path}: rope factor must be at least 1, got {rope['factor']}")
    return RopeScaling(
        type=rope_type, **{k: value for k, value in values.items() if value is not None}
    )


def scaling_table(scaling: RopeScaling | None) -> Mapping[str, object] | None:
    """Return `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    values = {_rope_key(name): value for name, value in scaling.used.items()}
    if scaling.type == "yarn":
        values["attention_factor"] = scaling.temperature  # the default in full
    return {"rope_type": scaling.type, **{k: v for k, v in values.items() if v is not None}}


def _check_types(content: StoredJSON, types: Mapping[str, type]) -> None:
    """Raise CheckpointError for a present key of another type, or a float that is not above 0."""
    content.check_types(
        {key: value_type for key, value_type in types.items() if value_type is not float}
    )
    for key in (key for key, value_type in types.items() if value_type is float and key in content):
        value = content[key]
        if type(value) not in (int, float) or not 0 < value < inf:  # JSON's true is no number
            raise CheckpointError(
                f"{content.path} is damaged: '{key}' must be a number above 0, got {value!r:.60}"
            )
