"""How rotary wavelengths are stretched for contexts longer than those of pretraining.

Far fewer tokens of training are needed where distances look as they did before. Each way of
stretching is a dataclass: its fields name the settings, and a field without a default is one that
cannot be left out. `rope.py` computes with them. No torch here: `models/settings.py` reads them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

from torchtitan.base.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """Position interpolation: all rotary wavelengths grow alike (arXiv:2306.15595)."""

    type: ClassVar[Literal["linear"]] = "linear"
    factor: float
    """Wavelengths grow by this factor."""


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Llama 3.1's rule: long wavelengths grow, short ones stay."""

    type: ClassVar[Literal["llama3"]] = "llama3"
    factor: float
    """Wavelengths longer than original_max_position / low_freq_factor grow by this factor."""
    original_max_position: int
    """Context length of pretraining, in tokens."""
    low_freq_factor: float = 1.0
    """Bounds the long wavelengths, in turns within original_max_position."""
    high_freq_factor: float = 4.0
    """Wavelengths with more turns than this stay; those between are blended."""


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN: long wavelengths grow, short ones stay, attention is sharpened (arXiv:2309.00071)."""

    type: ClassVar[Literal["yarn"]] = "yarn"
    factor: float
    """Wavelengths of at most beta_slow turns within original_max_position grow by this factor."""
    original_max_position: int
    """Context length of pretraining, in tokens."""
    beta_fast: float = 32.0
    """Wavelengths with more turns than this stay; those between are blended."""
    beta_slow: float = 1.0
    """Bounds the long wavelengths, in turns within original_max_position."""
    attention_factor: float | None = None
    """Queries and keys grow by this factor, scores by its square; None: as the next two say."""
    mscale: float | None = None
    """DeepSeek's: with mscale_all_dim, rotated channels grow by g(mscale) / g(mscale_all_dim),
    where g(m) = 0.1 m ln(factor) + 1; without these two by g(1)."""
    mscale_all_dim: float | None = None
    """DeepSeek's: the scores of latent attention, which rotates a part of the channels alone, grow
    by the square of g(mscale_all_dim)."""

    @property
    def temperature(self) -> float:
        """The factor on rotated queries and keys: the paper's sqrt(1/t)."""
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._growth(self.mscale) / self._growth(self.mscale_all_dim)
        return self._growth(1.0)

    @property
    def score_growth(self) -> float:
        """The factor on the scores of latent attention."""
        return self._growth(self.mscale_all_dim or 0.0) ** 2

    def _growth(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling
SCALINGS: Mapping[str, type[RopeScaling]] = {
    scaling.type: scaling for scaling in (LinearScaling, Llama3Scaling, YarnScaling)
}


def reading(setting: str) -> tuple[str, ...]:
    """Return the ways of stretching that read a setting."""
    return tuple(
        name
        for name, scaling in SCALINGS.items()
        if setting in {field.name for field in fields(scaling)}
    )


def build_scaling(name: str, given: Mapping[str, float | None]) -> RopeScaling | None:
    """Return the stretch of that name, with defaults where a setting is None; "none" is None.

    Raises:
        ConfigError: The bounds of long and short wavelengths are in the wrong order.
    """
    if name not in SCALINGS:
        return None
    values: dict[str, Any] = {key: value for key, value in given.items() if value is not None}
    scaling = SCALINGS[name](**values)
    if isinstance(scaling, Llama3Scaling):
        _check_order(scaling, low="low_freq_factor", high="high_freq_factor")
    elif isinstance(scaling, YarnScaling):
        _check_order(scaling, low="beta_slow", high="beta_fast")
    return scaling


def _check_order(scaling: RopeScaling, *, low: str, high: str) -> None:
    low_value, high_value = getattr(scaling, low), getattr(scaling, high)
    if low_value >= high_value:
        raise ConfigError.at(
            (f"model.rope_scaling.{high}", f"model.rope_scaling.{low}"),
            f"must be greater than {low}, got {high_value:g} and {low_value:g}; raise {high} or "
            f"lower {low}",
        )


def warn_of_positions(scaling: RopeScaling | None, *, seq_len: int) -> None:
    """Warn if sequences are longer than the rotation was stretched for."""
    if scaling is None or isinstance(scaling, LinearScaling):
        return
    reached = int(scaling.factor * scaling.original_max_position)
    if reached < seq_len:
        logger.warning(
            "The rope scaling reaches %d positions (factor %g x original_max_position %d), "
            "training.seq_len is %d; to reach as many raise model.rope_scaling.factor to %g",
            reached,
            scaling.factor,
            scaling.original_max_position,
            seq_len,
            seq_len / scaling.original_max_position,
        )
