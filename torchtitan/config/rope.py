"""How the rotary wavelengths are scaled: the section [model.rope_scaling].

Each type reads some of the keys. A key that the type does not read is refused, not ignored, which
is why none has a default here: the defaults are the model's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.types import STRICT, AtLeastOne, FinitePositive


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


NEEDED: Mapping[str, tuple[str, ...]] = {
    "flavor": (),
    "none": (),
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position"),
    "yarn": ("factor", "original_max_position"),
}
"""Keys that a type cannot do without."""

READ: Mapping[str, tuple[str, ...]] = {
    **NEEDED,
    "llama3": (*NEEDED["llama3"], "low_freq_factor", "high_freq_factor"),
    "yarn": (*NEEDED["yarn"], "beta_fast", "beta_slow", "attention_factor"),
}
"""Keys that a type reads."""
