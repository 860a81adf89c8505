"""The learning rate: warmup, stable, decay, as a pure function of the step.

Nothing is kept between steps, so a resumed run cannot read a stale rate and two runs with the same
settings agree to the last digit. The shape is the one of "MiniCPM" (arXiv 2404.06395): linear
warmup to the peak, a flat part, and a decay over the last `decay_ratio` of the schedule.

A decay that reached 0 at the last step would waste that step, so it is the step after the last one
that would have the floor, as in torchtitan 0.2.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable

import torch

from torchtitan.base.errors import ConfigError
from torchtitan.base.own import load_object, within
from torchtitan.optim.settings import LRSchedulerConfig

Schedule = Callable[[int], float]
"""Maps a step, counted from 1, to its learning rate."""

_REMAINING: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def build_schedule(settings: LRSchedulerConfig, *, peak_lr: float, training_steps: int) -> Schedule:
    """Return the learning rate as a function of the step, 1 for the first.

    Of T steps, W warm up: step s <= W has s/W of the peak. D decay, which is decay_ratio * T or all
    after the warmup: step s has the part that `decay_type` leaves at (s - 1 - (T - D)) / D, so that
    step T + 1 would have `min_lr_factor * peak_lr`, and has it if training goes on. With
    `decay_end = "last_step"` step T has it already: (s - (T - D)) / D.
    """
    total = settings.total_steps or training_steps
    warmup = settings.num_warmup_steps(total)
    num_decay = total - warmup
    if settings.decay_ratio is not None:
        num_decay = min(num_decay, round(total * settings.decay_ratio))
    last_at_peak = total - num_decay + (settings.decay_end == "after_last_step")
    remaining = find_decay(settings.decay_type)

    def lr_at(step: int) -> float:
        assert step >= 1, f"steps are counted from 1, got {step}"
        if step <= warmup:
            return peak_lr * step / warmup
        into_decay = step - last_at_peak
        if num_decay <= 0 or into_decay <= 0:
            return peak_lr
        left = remaining(min(1.0, into_decay / num_decay))
        return peak_lr * (settings.min_lr_factor + (1.0 - settings.min_lr_factor) * left)

    return lr_at


def find_decay(name: str) -> Callable[[float], float]:
    """Return the shape of a decay: from the part that is done, 0 to 1, to the part that is left.

    Raises:
        ConfigError: A function of the user's own is not there, or returns no finite number.
    """
    if name in _REMAINING:
        return _REMAINING[name]
    key = "lr_scheduler.decay_type"
    decay: Callable[[float], float] = load_object(name, key=key)

    def checked(progress: float) -> float:
        with within(name, key=key):
            left = decay(progress)
        if not isinstance(left, (int, float)) or not 0 <= left <= sys.float_info.max:
            rule = (
                f"'{name}' must return a number from 0 on for each part from 0 to 1 of the decay "
                f"that is done, got {left!r:.80} for {progress}; mend it"
            )
            raise ConfigError.at(key, rule)
        return left

    for percent in range(101):
        checked(percent / 100)
    return checked


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write the learning rate of the coming step into every parameter group, each its own part."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
