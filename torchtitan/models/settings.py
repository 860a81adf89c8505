"""The settings of the model: the sections [model] and [model.rope_scaling].

Each type of scaling reads some of the keys (`READ`). A key that the type does not read
is refused, not ignored, so none has a default here: the defaults are those of the type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.types import STRICT, AboveOne, AtLeastOne, FinitePositive, Strings, Text
from torchtitan.models.rope_scaling import SCALINGS


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RopeScalingConfig:
    """The stretch of the rotary wavelengths, for contexts longer than those of pretraining."""

    type: Literal["flavor", "none", "linear", "llama3", "yarn"] = "flavor"
    """flavor: as model.flavor has it; none: no stretch; linear: all alike (position interpolation);
    llama3: long wavelengths alone, as Llama 3.1; yarn: the same by YaRN's rule, and sharper
    attention."""
    factor: AtLeastOne | None = None
    """Long wavelengths grow by this factor: the new context length over the one of pretraining
    (linear, llama3, yarn)."""
    original_max_position: PositiveInt | None = None
    """Context length of pretraining, in tokens (llama3, yarn)."""
    low_freq_factor: FinitePositive | None = None
    """Wavelengths with fewer turns than this in original_max_position grow in full; 1 if not given
    (llama3)."""
    high_freq_factor: FinitePositive | None = None
    """Wavelengths with more turns than this stay; 4 if not given (llama3)."""
    beta_fast: FinitePositive | None = None
    """Wavelengths with more turns than this in original_max_position stay; 32 if not given
    (yarn)."""
    beta_slow: FinitePositive | None = None
    """Wavelengths with fewer turns than this grow in full; 1 if not given (yarn)."""
    attention_factor: FinitePositive | None = None
    """Queries and keys are multiplied by this; 0.1 ln(factor) + 1 if not given (yarn)."""


READ: Mapping[str, tuple[str, ...]] = {"flavor": (), "none": ()} | {
    name: tuple(field.name for field in fields(scaling)) for name, scaling in SCALINGS.items()
}
"""Keys that a type reads."""
NEEDED: Mapping[str, tuple[str, ...]] = {"flavor": (), "none": ()} | {
    name: tuple(field.name for field in fields(scaling) if field.default is MISSING)
    for name, scaling in SCALINGS.items()
}
"""Keys that a type cannot do without."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Which model, and the tokenizer that goes with it."""

    name: Text = "llama3"
    """Model family: a key of torchtitan.models.families.MODELS."""
    flavor: Text = "debugmodel"
    """Size within the family, e.g. debugmodel, small, 1B, 3B, 8B, 70B, 405B."""
    tokenizer_path: Text = "bpe_2048"
    """Built-in name (bpe_2048, byte), tiktoken file (Llama 3's tokenizer.model), or tokenizer.json
    or its folder."""
    converters: Strings = ()
    """What layers are converted to before they are trained: "float8", as [quantize.linear.float8]
    says; empty: nothing."""
    vocab_size: PositiveInt | None = None
    """Rows of the embedding and of the output head; the flavor's if not given."""
    rope_theta: AboveOne | None = None
    """Base of the rotary wavelengths; the flavor's if not given."""
    rope_scaling: RopeScalingConfig = Field(default_factory=RopeScalingConfig)
    """Stretch of the rotary wavelengths."""
