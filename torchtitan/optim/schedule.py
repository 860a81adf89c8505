"""The learning rate: warmup, stable, decay, as a pure function of the step.

Nothing is kept between steps, so a resumed run cannot read a stale rate and two runs with the same
settings agree to the last digit. The shape follows "MiniCPM" (arXiv 2404.06395): linear warmup
to the peak, a flat part, and a decay over the last `decay_ratio` of the schedule.

A decay that reached 0 at the last step would waste that step. So the decay ends one step after the
last, as in torchtitan 0.2.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch

from torchtitan.base.custom import convert_errors, load_object
from torchtitan.base.errors import ConfigError
from torchtitan.optim.settings import LRSchedulerConfig

Schedule = Callable[[int], float]
"""Maps a step, counted from 1, to its learning rate."""

DECAYS: dict[str, Callable[[float], float]] = {
    "linear": lambda progress: 1.0 - progress,
    "sqrt": lambda progress: 1.0 - math.sqrt(progress),
    "cosine": lambda progress: 0.5 * (1.0 + math.cos(math.pi * progress)),
}


def build_schedule(settings: LRSchedulerConfig, *, peak_lr: float, training_steps: int) -> Schedule:
    """Return the learning rate as a function of the step, 1 for the first.

    Of T steps, the first W warm up: step s <= W has s/W of the peak. The last D decay, which are
    decay_ratio * T or all after the warmup: step s has the share that `decay_type` leaves at (s - 1
    - (T - D)) / D. So step T + 1 would have `min_lr_factor * peak_lr`, and has it if training
    continues. With `decay_end = "last_step"` step T has it already: (s - (T - D)) / D.

    `training_steps` is the default of `total_steps`.
    """
    total = settings.total_steps or training_steps
    warmup = settings.num_warmup_steps(total)
    num_decay = total - warmup
    if settings.decay_ratio is not None:
        num_decay = min(num_decay, round(total * settings.decay_ratio))
    last_at_peak = total - num_decay + (settings.decay_end == "after_last_step")
    remaining = find_decay(settings.decay_type, settings.decay_options)

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


def find_decay(name: str, options: Mapping[str, Any]) -> Callable[[float], float]:
    """Return the shape of a decay, from the share of the decay done, 0 to 1, to the share of the
    rate left. A custom function is called with `options`. Raises ConfigError if a custom function
    cannot be imported or called, or, when it is called, returns no finite number >= 0, with which
    weights would become NaN or climb."""
    if name in DECAYS:
        return DECAYS[name]
    key = "lr_scheduler.decay_type"
    decay: Callable[..., float] = load_object(name, key=key)
    if not callable(decay):
        rule = f"'{name}' must be a function from 0 to 1 of the decay done to the part left"
        raise ConfigError.at(key, f"{rule}, got {decay!r:.80}")

    def checked(progress: float) -> float:
        with convert_errors(name, key=key):
            left = decay(progress, **options)
        if not 0 <= left < math.inf:
            rule = f"'{name}' must return a finite number from 0 on"
            raise ConfigError.at(key, f"{rule}, got {left!r:.80} for {progress}")
        return left

    return checked


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """Write the learning rate of the next step into every parameter group, times its scale."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_scale"]
