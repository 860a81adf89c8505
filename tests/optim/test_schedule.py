"""The learning rate against closed forms, and as a pure function."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from torchtitan.optim.schedule import build_schedule
from torchtitan.optim.settings import LRSchedulerConfig


def rates(steps: int, **settings: object) -> list[float]:
    schedule = build_schedule(LRSchedulerConfig(**settings), peak_lr=2.0, training_steps=steps)
    return [schedule(step) for step in range(1, steps + 1)]


DECAYS = {
    "linear": lambda progress: 1 - progress,
    "sqrt": lambda progress: 1 - progress**0.5,
    "cosine": lambda progress: math.cos(math.pi * progress / 2) ** 2,
}


def reference(steps: int, *, warmup: int, ratio: float | None, kind: str, floor: float) -> list:
    """The rates of all steps and of the one after them, in units of the peak, from corner points:
    0 before the first step, the peak where warmup ends and decay begins, the floor past the end."""
    num_decay = steps - warmup if ratio is None else min(round(steps * ratio), steps - warmup)
    at = np.arange(1, steps + 2, dtype=np.float64)
    rising = np.interp(at, [0, max(warmup, 1e-9)], [0, 1])
    progress = np.interp(at, [steps + 1 - num_decay, steps + 1], [0, 1]) if num_decay else 0 * at
    falling = floor + (1 - floor) * np.vectorize(DECAYS[kind], otypes=[float])(progress)
    return list(rising * falling)


@pytest.mark.promise("learning-rate")
@pytest.mark.parametrize("kind", DECAYS)
@pytest.mark.parametrize("warmup", [0, 1, 7, 20])
@pytest.mark.parametrize("ratio", [None, 0.0, 0.05, 0.3, 0.8, 1.0])
def test_the_step_after_the_last_one_would_have_the_floor(
    kind: str, warmup: int, ratio: float | None
) -> None:
    for floor in (0.0, 0.1):
        settings = LRSchedulerConfig(
            warmup_steps=warmup, decay_ratio=ratio, decay_type=kind, min_lr_factor=floor
        )
        lr = build_schedule(settings, peak_lr=2.0, training_steps=60)
        expected = reference(60, warmup=warmup, ratio=ratio, kind=kind, floor=floor)
        assert [lr(step) / 2 for step in range(1, 62)] == pytest.approx(expected, abs=1e-14)
        assert lr(60) > 2.0 * floor  # the last step trains


@pytest.mark.promise("learning-rate")
@pytest.mark.parametrize(
    ("settings", "theirs"),
    [
        (
            {"warmup_steps": 2, "decay_ratio": 0.8},
            [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125],
        ),
        (
            {"warmup_steps": 0, "decay_ratio": 0.5, "total_steps": 12, "decay_type": "sqrt"},
            [1.0] * 7 + [0.591751709536, 0.42264973081, 0.292893218813],
        ),
        (
            {"warmup_steps": 4, "min_lr_factor": 0.1, "decay_type": "cosine"},
            [0.25, 0.5, 0.75, 1.0, 1.0, 0.939711431703, 0.775, 0.55, 0.325, 0.160288568297],
        ),
    ],
)
def test_rates_are_those_of_torchtitan(settings: dict[str, object], theirs: list[float]) -> None:
    """As torchtitan 0.2.2's own scheduler gave them."""
    assert [lr / 2 for lr in rates(10, **settings)] == pytest.approx(theirs, abs=1e-12)


@pytest.mark.promise("learning-rate")
def test_linear_warmup_and_decay_equal_torchs_own_schedulers() -> None:
    lrs = rates(30, warmup_steps=10)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=2.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[10])
    theirs = []
    for _ in range(30):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert lrs == pytest.approx(theirs, abs=1e-12)


@pytest.mark.promise("learning-rate")
@pytest.mark.parametrize("total", [None, 200])
def test_a_warmup_ratio_is_of_the_schedule_and_not_of_the_run(total: int | None) -> None:
    by_ratio = {"warmup_ratio": 0.1, "total_steps": total, "decay_ratio": 0.5}
    by_steps = by_ratio | {"warmup_ratio": None, "warmup_steps": (total or 50) // 10}
    assert rates(50, **by_ratio) == rates(50, **by_steps)


@pytest.mark.promise("learning-rate")
def test_a_pinned_length_makes_the_curve_independent_of_training_steps() -> None:
    settings = {"warmup_steps": 5, "total_steps": 40, "decay_ratio": 0.5}
    assert rates(20, **settings) == rates(40, **settings)[:20]
    settings = {"warmup_ratio": 0.3, "total_steps": 40, "decay_ratio": 0.5}
    assert rates(20, **settings) == rates(40, **settings)[:20]


def cubic(progress: float) -> float:
    return (1 - progress) ** 3


@pytest.mark.parametrize("end", ["after_last_step", "last_step"])
def test_a_decay_of_the_users_own(end: str) -> None:
    own, linear = (
        rates(12, decay_type=decay, warmup_steps=2, min_lr_factor=0.25, decay_end=end)
        for decay in (f"{__name__}:cubic", "linear")
    )
    # of a peak of 2: what is left by the linear decay, to the third power, over the floor
    for cube, straight in zip(own, linear, strict=True):
        left = (straight / 2 - 0.25) / 0.75 if straight >= 0.5 else None
        expected = straight if left is None or straight == 1.0 else 2 * (0.25 + 0.75 * left**3)
        assert cube == pytest.approx(expected)
