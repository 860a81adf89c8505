"""The learning rate: warmup, stable, decay, as a pure function of the step.

Nothing is kept between steps, so a resumed run cannot read a stale rate and two runs with the same
settings agree to the last digit. The shape is the one of "MiniCPM" (arXiv 2404.06395): linear
warmup to the peak, a flat part, and a decay over the last `decay_ratio` of the schedule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from torchtitan.config.schema import LRSchedulerConfig

Schedule = Callable[[int], float]
"""Maps a step, counted from 1, to its learning rate."""

_REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def build_schedule(settings: LRSchedulerConfig, *, peak_lr: float, training_steps: int) -> Schedule:
    """Return the learning rate as a function of the step, 1 for the first.

    The warmup has `warmup_steps` equal rises, the last of which reaches the peak. The decay takes
    the last `decay_ratio * total_steps` steps (all steps after the warmup if not given) and reaches
    `min_lr_factor * peak_lr` at `total_steps`, where it stays if training goes on.
    """
    total = settings.total_steps or training_steps
    warmup = settings.warmup_steps
    num_decay = total - warmup
    if settings.decay_ratio is not None:
        num_decay = min(num_decay, round(total * settings.decay_ratio))
    remaining = _REMAINING[settings.decay_type]

    def lr_at(step: int) -> float:
        assert step >= 1, f"steps are counted from 1, got {step}"
        if step <= warmup:
            return peak_lr * step / warmup
        into_decay = step - (total - num_decay)
        if num_decay <= 0 or into_decay <= 0:
            return peak_lr
        left = remaining(min(1.0, into_decay / num_decay))
        return peak_lr * (settings.min_lr_factor + (1.0 - settings.min_lr_factor) * left)

    return lr_at


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write the learning rate of the coming step into every parameter group."""
    for group in optimizer.param_groups:
        group["lr"] = lr
