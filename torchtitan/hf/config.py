"""Read and write the sizes of a model in Hugging Face's config.json.

A model with another rope base, norm epsilon or number of heads often loads without an error, as all
shapes agree. So every size is compared, and a key or value without support is an error. Which key
holds which size is data of the family (`HFFormat`).

transformers 5 stores the rotary embedding in `rope_parameters`, version 4 in `rope_theta` and
`rope_scaling`. Both forms are read. Version 4's form is written, because both versions read it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import Any

import torch

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import StoredJSON, read_json
from torchtitan.hf.names import ADAPTER_CONFIG, CONFIG
from torchtitan.models.sizes import ROPE_KEYS, DecoderConfig, MoEConfig, RopeScaling
from torchtitan.models.spec import NESTED_THETA, REQUIRED, UNUSED, HFFormat, ModelSpec, Size

logger = logging.getLogger(__name__)
VISIBLE_IN_SHAPES = ("num_hidden_layers", "vocab_size", "tie_word_embeddings")
"""Sizes that the names and shapes of the tensors determine."""
NULLABLE = ("sliding_window", "q_lora_rank")
"""Counts that may be null; for other keys null means the default."""
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
CARRIED = (
    *("max_position_embeddings", *TOKEN_IDS, "initializer_range", "attention_dropout"),
    *("pretraining_tp", "router_aux_loss_coef", "output_router_logits"),
)
"""Keys of a base model's config.json that an export keeps. No other key may name code to load."""
MAX_COUNT, MAX_LAYERS = 10**8, 10**4
"""Limits of counts in a file, because the model is built before its weights are read."""
ORIGINAL, ROPE = "original_max_position_embeddings", "rope_parameters"
RENAMED = {ORIGINAL: "original_max_position", "type": "rope_type"}
MXFP4 = 0, 32
"""Stands for that format (OCP Microscaling Formats, 1.0). Blocks of float8 have rows."""
ROPE_REQUIRED = ("factor", "original_max_position", "low_freq_factor", "high_freq_factor")
ROPE_NUMBERS = {
    "rope_theta",
    "partial_rotary_factor",
    *(k for ks in ROPE_KEYS.values() for k in ks),
}
DEFAULT_THETA = 10_000.0


def read_config(folder: Path) -> StoredJSON:
    """Return the config.json of a folder without its nulls; raise CheckpointError if the file is
    missing or damaged."""
    refuse_adapter(folder)
    content = read_json(folder / CONFIG)
    kept = {k: value for k, value in content.items() if value is not None or k in NULLABLE}
    types = {"max_position_embeddings": int, "rope_parameters": dict, "rope_scaling": dict}
    return StoredJSON(content.path, kept).check_types(types)


def refuse_adapter(folder: Path) -> None:
    """Raise CheckpointError for a folder of PEFT without a model."""
    if (folder / ADAPTER_CONFIG).is_file() and not (folder / CONFIG).is_file():
        raise CheckpointError(
            f"{folder} holds a LoRA adapter without the model: name the step of the run that "
            f'trained it, or a folder with merged weights (lora.export_format = "merged")'
        )


def family_of(config: StoredJSON, *, models: Mapping[str, ModelSpec]) -> ModelSpec:
    """Return the family of a config.json; raise CheckpointError if the architecture or one of its
    options is unsupported."""
    for spec in models.values():
        if config.get("architectures") == [spec.hf.architecture]:
            check_family(config, format=spec.hf)
            return spec
    families = ", ".join(spec.hf.architecture for spec in models.values() if spec.hf.names)
    raise CheckpointError(
        f"{config.path}: architectures must be one of {families}, got "
        f"{config.get('architectures')!r:.200}; to train another one set model.name = "
        f'"transformers"'
    )


def check_family(config: StoredJSON, *, format: HFFormat) -> None:
    """Raise CheckpointError if the architecture is another one, or has an unsupported option."""
    if config.get("architectures") != [format.architecture]:
        raise CheckpointError(
            f'{config.path}: architectures must be ["{format.architecture}"], got '
            f'{config.get("architectures")}; set model.flavor = "hf" without model.name'
        )
    find_quantization(config)
    options, wrong = {**config, **rope_table(config, format=format)}, []
    for key, supported in {
        "partial_rotary_factor": 1.0,
        **format.fixed,
        **format.each_layer,
    }.items():
        if key in format.sizes:
            continue
        value = options.get(key, None if key in format.required else supported)
        is_listed = key in format.each_layer and isinstance(value, list)
        if any(item != supported for item in (value if is_listed else [value])):
            wrong.append(f"{key} must be {supported!r}, got {value!r:.80}")
    if wrong:
        raise CheckpointError(f"{config.path} has unsupported options: {'; '.join(wrong)}")


def architecture_of(config: StoredJSON, *, spec: ModelSpec) -> DecoderConfig:
    """Return the sizes in a config.json of the family `spec`; raise CheckpointError if a size is
    missing or impossible, or the rope scaling is unsupported."""
    values = _read_sizes(config, spec.hf)
    if values.get("head_dim", 0) is None:
        values["head_dim"] = values["dim"] // values["num_heads"]
    architecture = spec.sizes(**values, **spec.of_family)
    if wrong := next(architecture.violations(), None):
        raise CheckpointError(f"{config.path} has impossible sizes: {wrong}")
    return architecture


def _read_sizes(config: StoredJSON, format: HFFormat) -> dict[str, Any]:
    """Return the sizes in a config.json by their names here."""
    rope = rope_table(config, format=format)
    content = StoredJSON(config.path, {format.aliases.get(k, k): v for k, v in config.items()})
    content |= rope
    if (key := _local_theta_key(format)) is not None:
        local = _parse_rope(config.path, (config.get(ROPE) or {}).get("sliding_attention") or {})
        if local["rope_type"] != "default" or local.keys() - {"rope_type", "rope_theta"}:
            rule = "sliding_attention must have rope_type default and no key but rope_theta"
            raise CheckpointError(f"{config.path}: {rule}, got {dict(local)!r:.80}")
        if "rope_theta" in local:
            content[key] = local["rope_theta"]
    sizes = {"rope_theta": Size("rope_theta", float, default=DEFAULT_THETA), **format.sizes}
    values = {size.field: _read(content, key, size) for key, size in sizes.items()}
    if "L" not in values.get("layer_pattern", "L"):
        values["window"] = None  # no layer has the window in the file
    scaling = read_scaling(rope)
    if format.implied.get("rope_scaling", scaling) != scaling:
        got = f"got {rope['rope_type']!r:.60}"
        raise CheckpointError(f"{config.path}: rope_type must be default, {got}")
    return values | {"rope_scaling": scaling, **format.implied}


def _local_theta_key(format: HFFormat) -> str | None:
    """Return the key for the rope base of layers with a window, None if they have none."""
    keys = (key for key, size in format.sizes.items() if size.field == "local_rope_theta")
    return next(keys, None)


def _read(content: StoredJSON, key: str, size: Size) -> Any:
    """Return the size under a key, checked."""
    if size.layer_types is not None:
        return _read_pattern(content, key, size, size.layer_types)
    default = size.default
    if isinstance(default, str):
        default = content[default]
    value = content[key] if default is REQUIRED else content.get(key, default)
    if value is None:
        return None
    least = 0 if size.none_as == 0 else 1
    most = MAX_LAYERS if key == "num_hidden_layers" else MAX_COUNT
    is_first = isinstance(value, list) and value == [*range(len(value))]
    rules = {
        int: (f"an integer from {least} to {most}", type(value) is int and least <= value <= most),
        float: ("a number above 0", _is_positive(value)),
        bool: ("true or false", type(value) is bool),
        list: ("the first layers, [0, 1, ...]", is_first),
    }
    rule, is_valid = rules[size.type]
    if not is_valid:
        raise CheckpointError(f"{content.path}: {key} must be {rule}, got {value!r:.60}")
    if size.type is list:
        return len(value) or None
    if size.power != 1:
        value **= size.power
    return None if value == size.none_as else size.type(value)


def _read_pattern(
    content: StoredJSON, key: str, size: Size, layer_types: Mapping[str, object]
) -> str:
    """Return the shortest pattern of a list with one of `layer_types` per layer."""
    num_layers, letters, values = (
        content["num_hidden_layers"],
        [*layer_types],
        [*layer_types.values()],
    )
    of_layers = content.get(key)
    if of_layers is None:
        pattern = str(size.default)
        if (length := content.get(size.interval)) is not None:
            if type(length) is not int or length < 1:
                rule = f"{size.interval} must be an integer from 1, got {length!r:.60}"
                raise CheckpointError(f"{content.path}: {rule}")
            pattern = pattern[0] * min(length - 1, num_layers) + pattern[-1]
        pattern = (pattern * num_layers)[:num_layers]
    elif (
        isinstance(of_layers, list)
        and len(of_layers) == num_layers
        and all(value in values for value in of_layers)
    ):
        pattern = "".join(letters[values.index(value)] for value in of_layers)
    else:
        rule = f"must be {num_layers} of {', '.join(map(repr, values))}"
        raise CheckpointError(f"{content.path}: {key} {rule}, got {of_layers!r:.80}")
    return next(pattern[:n] for n in range(1, num_layers + 1) if pattern.startswith(pattern[n:]))


def _is_positive(value: object) -> bool:
    return type(value) in (int, float) and 0 < value < 1e38  # type: ignore[operator] # true is an int


def sizes_of(architecture: DecoderConfig, format: HFFormat) -> dict[str, Any]:
    """Return the sizes of a model as its config.json stores them."""
    resolved = _resolve(architecture)
    sizes: dict[str, Any] = {"rope_theta": architecture.rope_theta}
    has_local = any("L" in (size.layer_types or ()) for size in format.sizes.values())
    for key, size in format.sizes.items():
        value = resolved[size.field]
        if size.type is list:
            value = [*range(value or 0)]
        if size.layer_types is not None:
            layers = range(architecture.num_layers)
            value = [size.layer_types.get(architecture.layer_type(layer)) for layer in layers]
        elif size.field == "window" and value is None and has_local:
            value = size.default  # of no layer, but transformers needs one
        if size.power != 1:
            value = round(value ** (1 / size.power))
        sizes[key] = size.none_as if value is None else value
    return {**sizes, "rope_scaling": scaling_table(architecture.rope_scaling)}


def _resolve(architecture: DecoderConfig) -> dict[str, Any]:
    """Return the sizes with what None means for those that follow from others."""
    sizes, width = dict(vars(architecture)), architecture.head_width
    sizes |= {"head_dim": width, "attention_scale": architecture.attention_scale or width**-0.5}
    if isinstance(architecture, MoEConfig):
        sizes["expert_hidden_dim"] = architecture.expert_width
    return sizes


def _facts(architecture: DecoderConfig) -> dict[str, Any]:
    """Return all that a model computes with, by a size that it depends on."""
    types = [architecture.layer_type(layer) for layer in range(architecture.num_layers)]
    layers = [architecture.of_layer_type(name) for name in types]
    return _resolve(architecture) | {
        "rope_scaling": scaling_table(architecture.rope_scaling),
        "layer_pattern": [name == "N" for name in types],
        "window": [layer.window for layer in layers],
        "local_rope_theta": [
            (layer.rope_theta, scaling_table(layer.rope_scaling)) for layer in layers
        ],
    }


def find_inexpressible(architecture: DecoderConfig, format: HFFormat) -> str | None:
    """Describe the sizes that a config.json of the family cannot store: those that differ after it
    is written and read.

    Returns:
        None if it stores all.
    """
    if format.config:
        return None
    content = new_config(architecture, format=format, dtype=torch.float32, carried={})
    kept = {k: value for k, value in content.items() if value is not None or k in NULLABLE}
    try:
        values = _read_sizes(StoredJSON(Path(CONFIG), kept), format)
    except CheckpointError as error:
        return f"in a {format.architecture} {error}"
    constants = {
        item.name: item.default
        for item in fields(architecture)
        if item.default is not MISSING and not item.metadata.get("of_family")
    }
    ours, read = _facts(architecture), _facts(replace(architecture, **{**constants, **values}))
    wrong = [
        f"{name} must be {read[name]!r:.60}, got {value!r:.60}"
        for name, value in ours.items()
        if read[name] != value
    ]
    return f"in a {format.architecture} {'; '.join(wrong)}" if wrong else None


def check_sizes(
    config: StoredJSON,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    may_differ: Collection[str] = (),
) -> DecoderConfig:
    """Return the sizes in a config.json, which are the model's except the keys `may_differ`; raise
    CheckpointError if a size differs, or the file cannot state the model's."""
    if spec.hf.config:
        check_content(config, format=spec.hf)
        return architecture
    check_family(config, format=spec.hf)
    if (problem := find_inexpressible(architecture, spec.hf)) is not None:
        raise CheckpointError(f"{config.path} cannot have the sizes of this job: {problem}")
    in_file = architecture_of(config, spec=spec)
    stored, expected = sizes_of(in_file, spec.hf), sizes_of(architecture, spec.hf)
    wrong = []
    for key in (key for key in expected if stored[key] != expected[key]):
        text = f"{key}: {stored[key]!r:.80} in the file, {expected[key]!r} in this job"
        if key in may_differ:
            logger.info("%s: %s", config.path, text)
        else:
            wrong.append(text)
    if wrong:
        raise CheckpointError(
            "\n  ".join([f"{config.path} has other sizes than this job:", *wrong])
            + '\nto use the sizes in the file set model.flavor = "hf" and no sizes in [model]'
        )
    return in_file


def check_content(config: StoredJSON, *, format: HFFormat) -> None:
    """Raise CheckpointError if a config.json describes another model than `format.config`."""
    ours, ignored = format.config, {*CARRIED, *UNUSED}
    wrong = [
        f"{key}: {config.get(key)!r:.80} in the file, {ours.get(key)!r:.80} in this job"
        for key in sorted({*config, *ours} - ignored)
        if config.get(key) != ours.get(key)
    ]
    if wrong:
        raise CheckpointError(
            "\n  ".join([f"{config.path} describes another model than this job's:", *wrong])
        )


def new_config(
    architecture: DecoderConfig,
    *,
    format: HFFormat,
    dtype: torch.dtype,
    carried: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the config.json of a model; `carried` has its other keys, see `find_carried`."""
    sizes = dict(format.config) or {
        "architectures": [format.architecture],
        "model_type": format.model_type,
        **{key: value for key, value in format.fixed.items() if value is not None},
        **sizes_of(architecture, format),
        **({format.more_layers: 0} if format.more_layers else {}),
    }
    content = {
        **sizes,
        **carried,
        "use_cache": True,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }
    if (key := _local_theta_key(format)) is not None:  # version 5 reads all of this form only
        scaled = sizes["rope_scaling"] or {"rope_type": "default"}
        content[ROPE] = {
            "full_attention": {"rope_theta": architecture.rope_theta, **scaled},
            "sliding_attention": {"rope_theta": sizes[key], "rope_type": "default"},
        }
        content.pop(NESTED_THETA, None)
    scaling = architecture.rope_scaling
    if scaling is not None and scaling.type == "yarn":
        # transformers 4.53 ignores the factor and divides this by the original context
        values = scaling.used
        content["max_position_embeddings"] = int(values["factor"] * values["original_max_position"])
    return content


def find_carried(base: Path | None, *, seq_len: int, eos_id: int) -> dict[str, Any]:
    """Return the keys of an export's config.json that are no sizes.

    The `CARRIED` keys of the folder `base` are kept; None if the run starts from scratch. `seq_len`
    is the least context length, `eos_id` the end token, unless the base has one.
    """
    carried: dict[str, Any] = dict.fromkeys(TOKEN_IDS)
    carried |= {"max_position_embeddings": seq_len, "eos_token_id": eos_id}
    if base is None:
        return carried
    if not (base / CONFIG).is_file():
        logger.warning("%s is missing: its token ids and context length are not exported", base)
        return carried
    carried |= {key: value for key, value in read_config(base).items() if key in CARRIED}
    carried["max_position_embeddings"] = max(seq_len, carried["max_position_embeddings"])
    return carried


def find_quantization(config: StoredJSON) -> tuple[int, int] | None:
    """Return rows and columns of the blocks that share a scale; None if weights have no scales;
    raise CheckpointError if the weights are quantized in an unsupported way."""
    match config.get("quantization_config"):
        case None:
            return None
        case {"quant_method": "mxfp4"}:
            return MXFP4
        case {"quant_method": "fp8", "weight_block_size": [int(rows), int(cols)], **more} if (
            more.get("fmt", "e4m3") == "e4m3"
            and all(type(n) is int and n > 0 for n in (rows, cols))
        ):
            return rows, cols
    raise CheckpointError(
        f"{config.path}: quantization_config must have quant_method mxfp4, or fp8 and a "
        f"weight_block_size of two counts, got {config['quantization_config']!r:.80}"
    )


def rope_table(config: StoredJSON, *, format: HFFormat) -> StoredJSON:
    """Return the settings of the rotary embedding in a config.json, with our names of its numbers;
    raise CheckpointError if settings contradict each other, a key is unsupported, or a value is not
    a positive number."""
    table, scaling = config.get(ROPE) or {}, config.get("rope_scaling") or {}
    if table and _local_theta_key(format) is not None:
        if not table.keys() <= {"full_attention", "sliding_attention"}:
            rule = f"{ROPE} must have full_attention and sliding_attention, got {table!r:.80}"
            raise CheckpointError(f"{config.path}: {rule}")
        table = table.get("full_attention") or {}
    rope = _parse_rope(config.path, table or scaling)
    others: dict[str, Any] = {}
    if table and scaling:
        others |= _parse_rope(config.path, scaling)
    if "original_max_position" in rope and ORIGINAL in config:
        others["original_max_position"] = config[ORIGINAL]
    for key, other in others.items():
        if rope.get(key) != other:
            rule = f"{key} must be the same wherever it stands, got {rope.get(key)!r} and {other!r}"
            raise CheckpointError(f"{config.path}: {rule:.200}")
    return rope


def _parse_rope(path: Path, table: Any) -> StoredJSON:
    """Return one table of a rotary embedding with our names of its numbers."""
    if not isinstance(table, Mapping):
        raise CheckpointError(f"{path}: a rope must be an object, got {table!r:.60}")
    rope = StoredJSON(path, {"rope_type": "default"})
    has_new_name = table.get("rope_type") is not None
    for key, value in table.items():
        if value is None or (key == "type" and has_new_name):
            continue
        if key == "attn_factor":  # of DeepSeek-R1-0528-Qwen3-8B
            logger.info("%s: %s has no effect, as in transformers", path, key)
            continue
        name = str(RENAMED.get(key, key))
        is_number = name in ROPE_NUMBERS and key != "original_max_position"
        is_supported = name == "rope_type" or (is_number and _is_positive(value))
        if not is_supported and not (key == "truncate" and type(value) is bool):
            raise CheckpointError(f"{path}: unsupported rope setting {key} = {value!r:.60}")
        rope[name] = value
    return rope


def read_scaling(rope: StoredJSON) -> RopeScaling | None:
    """Return the scaling in the table of a rotary embedding, None if it has none; raise
    CheckpointError if the type is unsupported, or a key is missing."""
    if (rope_type := rope["rope_type"]) == "default":
        return None
    if not isinstance(rope_type, str) or rope_type not in ROPE_KEYS:
        raise CheckpointError(
            f"{rope.path}: rope_type must be default, {' or '.join(ROPE_KEYS)}, got "
            f"{rope_type!r:.60}"
        )
    names = ROPE_KEYS[rope_type]
    missing = [name for name in names if name in ROPE_REQUIRED and name not in rope]
    if missing or rope["factor"] < 1:
        problem = f"needs {missing[0]}" if missing else f"needs a factor >= 1, got {rope['factor']}"
        raise CheckpointError(f"{rope.path}: rope_type {rope_type} {problem}")
    values: dict[str, Any] = {name: rope[name] for name in names if name in rope}
    return RopeScaling(**values, type=rope_type)  # type: ignore[arg-type] # a key of ROPE_KEYS


def scaling_table(scaling: RopeScaling | None) -> Mapping[str, object] | None:
    """Return `rope_scaling` of a config.json."""
    if scaling is None:
        return None
    values = dict(scaling.used)
    if "original_max_position" in values:
        values[ORIGINAL] = values.pop("original_max_position")
    if scaling.type == "yarn":
        values["attention_factor"] = scaling.temperature  # the default in full
    return {"rope_type": scaling.type, **{k: v for k, v in values.items() if v is not None}}
