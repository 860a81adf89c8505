"""The sections [model] and [model.rope_scaling].

The sizes of all families are keys of [model] too, each in place of the flavor's. `layout.py`
refuses a size that the model's family lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, fields, make_dataclass
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_type_hints

from torchtitan.base.errors import ConfigError, Violation, did_you_mean
from torchtitan.config.settings import (
    IMPORT_PATH,
    SET,
    FiniteNonNegative,
    FinitePositive,
    LocalPath,
    NonNegativeInt,
    Options,
    PositiveInt,
    Range,
    Requires,
    Text,
    convert,
    finite,
)
from torchtitan.models.sizes import ROPE_KEYS, DecoderConfig, MLAConfig, RopeScaling

HF = "hf"
"""The flavor, and the name, of a job whose model comes from a Hugging Face folder."""
ALL_SIZES = MLAConfig
"""Has the sizes of every built-in family."""


def _types_using(key: str) -> tuple[str, ...]:
    return tuple(name for name, keys in ROPE_KEYS.items() if key in keys)


WITH_FACTOR, WITH_ORIGINAL = _types_using("factor"), _types_using("original_max_position")
LLAMA3, YARN = _types_using("low_freq_factor"), _types_using("beta_fast")


@dataclass(frozen=True, kw_only=True)
class RopeScalingConfig:
    """Growth of the rotary wavelengths, for contexts longer than in pretraining."""

    # a key that the type does not use is refused, so a key that is not given is None, and the
    # defaults are those of RopeScaling
    type: Annotated[
        Literal["flavor", "none", "linear", "llama3", "yarn"],
        Requires("factor", SET, "set it", of=WITH_FACTOR),
        Requires("original_max_position", SET, "set it", of=WITH_ORIGINAL),
    ] = "flavor"
    """flavor: as in model.flavor; none: no scaling; linear: all wavelengths grow (position
    interpolation); llama3: only long wavelengths grow, as in Llama 3.1; yarn: the same by YaRN's
    rule, and attention is sharpened."""
    factor: Annotated[float | None, finite, Range(ge=1), Requires("type", WITH_FACTOR)] = None
    """Long wavelengths grow by this factor: the new context length over the original one."""
    original_max_position: Annotated[PositiveInt | None, Requires("type", WITH_ORIGINAL)] = None
    """Context length of pretraining, in tokens."""
    low_freq_factor: Annotated[FinitePositive | None, Requires("type", LLAMA3)] = None
    """Wavelengths with fewer turns than this in original_max_position grow by the full factor.
    Default: 1."""
    high_freq_factor: Annotated[FinitePositive | None, Requires("type", LLAMA3)] = None
    """Wavelengths with more turns than this stay. Default: 4."""
    beta_fast: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """Wavelengths with more turns than this in original_max_position stay. Default: 32."""
    beta_slow: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """Wavelengths with fewer turns than this grow by the full factor. Default: 1."""
    attention_factor: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """Queries and keys are multiplied by this. Default: 0.1 ln(factor) + 1, unless mscale and
    mscale_all_dim are given."""
    mscale: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """DeepSeek's: with mscale_all_dim, rotated channels are multiplied by g(mscale) /
    g(mscale_all_dim), where g(m) = 0.1 m ln(factor) + 1."""
    mscale_all_dim: Annotated[FinitePositive | None, Requires("type", YARN)] = None
    """DeepSeek's: the scores of latent attention are multiplied by the square of
    g(mscale_all_dim)."""

    @classmethod
    def of(cls, scaling: RopeScaling | None) -> RopeScalingConfig:
        """Return the settings of a scaling."""
        if scaling is None:
            return cls(type="none")
        values: dict[str, Any] = {"type": scaling.type, **scaling.used}
        return cls(**values)

    def build(self) -> RopeScaling | None:
        """Return the scaling of these settings, whose type is not "flavor"."""
        if self.type == "none":
            return None
        values = {key: getattr(self, key) for key in ROPE_KEYS[self.type]}
        return RopeScaling(
            type=self.type, **{key: value for key, value in values.items() if value is not None}
        )

    def violations(self) -> Iterator[Violation]:
        """Yield a violation if the bounds of long and short wavelengths are in the wrong order."""
        for low, high in (("low_freq_factor", "high_freq_factor"), ("beta_slow", "beta_fast")):
            low_value = getattr(self, low) or getattr(RopeScaling, low)
            high_value = getattr(self, high) or getattr(RopeScaling, high)
            if low_value >= high_value:
                yield Violation(
                    (high, low),
                    f"{high} must be greater than {low}, got {high_value:g} and {low_value:g}",
                )


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model to train, and its tokenizer."""

    name: Text = "llama3"
    """Model family: a key of torchtitan.models.families.MODELS, or the import path of your own
    ModelSpec, "package.module:SPEC"."""
    flavor: Text = "debugmodel"
    """Size within the family, e.g. debugmodel, small, 1B, 3B, 8B, 70B, 405B; or "hf": family, sizes
    and tokenizer come from the Hugging Face folder in checkpoint.initial_load_path. "hf" is the
    default if initial_load_in_hf is true."""
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
    rope_scaling: RopeScalingConfig = field(default_factory=RopeScalingConfig)
    """Growth of the rotary wavelengths."""
    options: Annotated[Options, Requires("name", IMPORT_PATH)] = field(default_factory=dict)
    """Sizes of a custom family that are no keys here, in place of the flavor's."""


def given_sizes(settings: ModelConfig, *, of: type[DecoderConfig]) -> dict[str, Any]:
    """Return the sizes of `of` that the settings give; None for one that they set to 0.

    Raises:
        ConfigError: An option is no size of `of`, or has the wrong type.
    """
    names = [size.name for size in fields(of) if size.name != "rope_scaling"]
    values = {name: getattr(settings, name) for name in names if hasattr(settings, name)}
    sizes = {n: None if repr(v) == "0" else v for n, v in values.items() if v is not None}
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
        plain = [kind for kind in get_args(hints[size.name]) if kind is not NoneType]
        kind: Any = scalars.get((plain or [hints[size.name]])[0])
        if kind is None or hasattr(section, size.name) or size.metadata.get("of_family"):
            continue
        text = "In place of the flavor's."
        if kind is PositiveInt and plain:  # 0 takes away the flavor's
            kind, text = NonNegativeInt, f"{text} 0: the default."
        key = field(default=None, metadata={"source": (of, text)})
        keys.append((size.name, kind | None, key))
    namespace = {"__doc__": section.__doc__, "__module__": section.__module__}
    return make_dataclass(
        section.__name__, keys, bases=(section,), namespace=namespace, frozen=True, kw_only=True
    )


if TYPE_CHECKING:
    ModelSection = ModelConfig
else:
    ModelSection = _with_sizes(ModelConfig, of=ALL_SIZES)
