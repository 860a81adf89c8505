"""The sections [model] and [model.rope_scaling].

The sizes of all families are keys of [model] too, each in place of the flavor's. `layout.py`
refuses a size that the model's family lacks.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields, make_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from torchtitan.base.custom import is_import_path
from torchtitan.base.errors import ConfigError, did_you_mean
from torchtitan.config.settings import (
    FiniteNonNegative,
    LocalPath,
    NonNegativeInt,
    Options,
    PositiveInt,
    Range,
    Requires,
    Rule,
    Text,
    convert,
    finite,
)
from torchtitan.models.sizes import DecoderConfig, GLMConfig, MLAConfig, RopeScaling

HF = "hf"
"""The flavor, and the name, of a job whose model comes from a Hugging Face folder."""
TRANSFORMERS = "transformers"
"""The name of a model that the library transformers builds (`models/transformers.py`)."""
OWN_SIZES = Rule("= package.module:NAME", lambda name: name == TRANSFORMERS or is_import_path(name))


@dataclass(frozen=True, kw_only=True)
class AllSizes(GLMConfig, MLAConfig):
    """Has the sizes of every built-in family."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train, and its tokenizer."""

    name: Text = "llama3"
    """Model family: a key of torchtitan.models.families.MODELS; "transformers": any dense decoder
    of that library; or the import path of your own ModelSpec, "package.module:SPEC"."""
    flavor: Text = "debugmodel"
    """Size within the family, e.g. debugmodel, small, 1B, 3B, 8B, 70B, 405B; or "hf": family, sizes
    and tokenizer come from the Hugging Face folder in checkpoint.initial_load_path. "hf" is the
    default if initial_load_in_hf is true. For "transformers": a folder with a config.json."""
    tokenizer_path: LocalPath = "bpe_2048"
    """Built-in name (bpe_2048, byte), tiktoken file (Llama 3's tokenizer.model), or tokenizer.json
    or its folder."""
    converters: Annotated[
        tuple[Literal["float8", "quantize.linear.float8"], ...],
        Requires("training.mixed_precision_param", ("bfloat16", "auto")),
        Requires("training.dtype", "float32"),
        Requires("lora.rank", 0),
    ] = ()
    """Conversions of layers before training: "float8", configured in [quantize.linear.float8]."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding and of the output head. Default: the flavor's."""
    rope_theta: Annotated[float, finite, Range(gt=1)] | None = None
    """Base of the rotary wavelengths. Default: the flavor's."""
    rope_scaling: RopeScaling = field(default_factory=RopeScaling)
    """Growth of the rotary wavelengths."""
    options: Annotated[Options, Requires("name", OWN_SIZES)] = field(default_factory=dict)
    """Sizes of a custom family that are no keys here, in place of the flavor's. A run of
    "transformers" stores its config.json here."""


def given_sizes(settings: ModelConfig, *, of: type[DecoderConfig]) -> dict[str, Any]:
    """Return the sizes of `of` that the settings give; None for one that they set to 0; raise
    ConfigError if an option is no size of `of`, or has the wrong type."""
    defaults = {size.name: size.default for size in fields(of) if size.name != "rope_scaling"}
    values = {name: getattr(settings, name) for name in defaults if hasattr(settings, name)}
    sizes = {
        name: None if repr(value) in ("0", "0.0") and defaults[name] is None else value
        for name, value in values.items()
        if value is not None
    }
    return sizes | _custom_sizes(settings, of=of)


def _custom_sizes(settings: ModelConfig, *, of: type[DecoderConfig]) -> dict[str, Any]:
    if not settings.options:
        return {}
    hints = get_type_hints(of)
    names = [size.name for size in fields(of) if not hasattr(settings, size.name)]
    sizes = {}
    for name, value in settings.options.items():
        if name not in names:
            rule = f"has no size {name!r}{did_you_mean(name, names)}"
            raise ConfigError.at("model.options", rule)
        try:
            sizes[name] = convert(value, hints[name])
        except ValueError as error:
            raise ConfigError.at("model.options", f"{name} {error}") from error
    return sizes


def _with_sizes(section: type, *, of: type[DecoderConfig]) -> type:
    """Return a subclass of a section with an optional key for each size of a model."""
    hints = get_type_hints(of)
    scalars: dict[type, Any]
    scalars = {int: PositiveInt, float: FiniteNonNegative, bool: bool, str: Text}
    keys = []
    for size in fields(of):
        plain = [
            annotation for annotation in get_args(hints[size.name]) if annotation is not NoneType
        ]
        annotation: Any = scalars.get((plain or [hints[size.name]])[0])
        if annotation is None or hasattr(section, size.name) or size.metadata.get("of_family"):
            continue
        text = "In place of the flavor's."
        if annotation in (PositiveInt, FiniteNonNegative) and plain:  # 0 takes away the flavor's
            text = f"{text} 0: the default."
            annotation = NonNegativeInt if annotation is PositiveInt else annotation
        key = field(default=None, metadata={"source": (of, text)})
        keys.append((size.name, annotation | None, key))
    namespace = {"__doc__": section.__doc__, "__module__": section.__module__}
    return make_dataclass(
        section.__name__, keys, bases=(section,), namespace=namespace, frozen=True, kw_only=True
    )


if TYPE_CHECKING:
    ModelSection = ModelConfig
else:
    ModelSection = _with_sizes(ModelConfig, of=AllSizes)
