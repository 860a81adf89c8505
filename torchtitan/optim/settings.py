"""The settings of the update: the sections [optimizer] and [lr_scheduler]."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.needs import InsteadOf, Needs
from torchtitan.config.types import (
    STRICT,
    Decay,
    FiniteNonNegative,
    FinitePositive,
    Fraction,
    Strings,
)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimizerConfig:
    """The optimizer and its constants."""

    name: Literal["Adam", "AdamW", "SGD"] = "AdamW"
    """Update rule."""
    lr: FinitePositive = 8e-4
    """Peak learning rate; the schedule multiplies it."""
    beta1: Decay = 0.9
    """Decay of the first moment (Adam, AdamW)."""
    beta2: Decay = 0.95
    """Decay of the second moment (Adam, AdamW)."""
    eps: FinitePositive = 1e-8
    """Added to the denominator (Adam, AdamW)."""
    momentum: Annotated[Decay, Needs("name", "SGD", "use beta1, or remove this")] = 0.0
    """Momentum."""
    weight_decay: FiniteNonNegative = 0.1
    """Weight decay of every parameter that no_decay_params does not match."""
    no_decay_params: Strings = ("*norm*", "*.bias")
    """Parameter names (shell patterns) that are never decayed."""
    frozen_params: Strings = ()
    """Parameter names (shell patterns) that are not trained: no gradient, no optimizer state."""
    implementation: Literal["for-loop", "foreach", "fused"] = "fused"
    """How the update runs: one kernel for all (fused; SGD: foreach), one for each operation
    (foreach), or a plain loop."""


DEFAULT_WARMUP_STEPS = 200


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LRSchedulerConfig:
    """Warmup, stable, decay: the learning rate as a pure function of the step."""

    warmup_steps: NonNegativeInt | None = None
    """Steps over which the rate grows linearly from near 0 to optimizer.lr; 200 if warmup_ratio is
    not given either."""
    warmup_ratio: Annotated[Fraction | None, InsteadOf("warmup_steps")] = None
    """The same as a part of total_steps, in place of warmup_steps."""
    total_steps: PositiveInt | None = None
    """Length of the schedule; training.steps if not given. Pin it to be free to change
    training.steps."""
    decay_ratio: Fraction | None = None
    """Part of total_steps spent in decay; if not given the decay starts right after the warmup."""
    decay_type: Literal["linear", "sqrt", "cosine"] = "linear"
    """Shape of the decay."""
    decay_end: Literal["after_last_step", "last_step"] = "after_last_step"
    """Where the decay reaches min_lr_factor. after_last_step: the step after total_steps would, so
    that every step trains; last_step: the last one does."""
    min_lr_factor: Fraction = 0.0
    """The decay ends at this multiple of optimizer.lr."""

    def __post_init__(self) -> None:
        """Settle the default, so that resolved settings say how long the warmup is."""
        if self.warmup_steps is None and self.warmup_ratio is None:
            object.__setattr__(self, "warmup_steps", DEFAULT_WARMUP_STEPS)

    def num_warmup_steps(self, total_steps: int) -> int:
        """Return the length of the warmup of a schedule of `total_steps`."""
        if self.warmup_ratio is not None:
            return round(self.warmup_ratio * total_steps)
        assert self.warmup_steps is not None
        return self.warmup_steps
