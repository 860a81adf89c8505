"""The learning rate against closed forms, and as a pure function."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch

from torchtitan.config.schema import LRSchedulerConfig
from torchtitan.optim.schedule import build_schedule, set_lr


def rates(steps: int, **settings: object) -> list[float]:
    schedule = build_schedule(LRSchedulerConfig(**settings), peak_lr=2.0, training_steps=steps)
    return [schedule(step) for step in range(1, steps + 1)]


def test_warmup_rises_in_equal_steps_to_the_peak() -> None:
    assert rates(100, warmup_steps=4)[:4] == [0.5, 1.0, 1.5, 2.0]


def test_without_decay_ratio_the_decay_follows_the_warmup_and_ends_at_the_floor() -> None:
    lrs = rates(12, warmup_steps=2, min_lr_factor=0.1)
    expected = [2.0 * (0.1 + 0.9 * (1 - k / 10)) for k in range(1, 11)]
    assert lrs[2:] == pytest.approx(expected, rel=1e-12)
    assert lrs[-1] == pytest.approx(0.2)


def test_stable_part_lies_between_warmup_and_decay() -> None:
    lrs = rates(100, warmup_steps=10, decay_ratio=0.2)
    assert lrs[9:80] == [2.0] * 71
    assert lrs[80] < 2.0


@pytest.mark.parametrize(
    ("kind", "middle"),
    [("linear", 0.5), ("sqrt", 1 - math.sqrt(0.5)), ("cosine", 0.5)],
)
def test_decay_shapes_at_half_way_and_at_the_end(kind: str, middle: float) -> None:
    lrs = rates(100, warmup_steps=0, decay_ratio=1.0, decay_type=kind)
    assert lrs[49] == pytest.approx(2.0 * middle)
    assert lrs[99] == pytest.approx(0.0, abs=1e-15)
    assert all(a >= b for a, b in pairwise(lrs))


def test_linear_warmup_and_decay_equal_torchs_own_schedulers() -> None:
    lrs = rates(30, warmup_steps=10)
    p = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([p], lr=2.0)
    warmup = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.1, total_iters=9)
    decay = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=20)
    scheduler = torch.optim.lr_scheduler.SequentialLR(optimizer, [warmup, decay], milestones=[9])
    theirs = []
    for _ in range(30):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()
    assert lrs == pytest.approx(theirs, abs=1e-12)


def test_a_pinned_length_makes_the_curve_independent_of_training_steps() -> None:
    settings = {"warmup_steps": 5, "total_steps": 40, "decay_ratio": 0.5}
    assert rates(20, **settings) == rates(40, **settings)[:20]


def test_the_rate_stays_at_the_floor_past_the_end() -> None:
    lrs = rates(20, warmup_steps=0, total_steps=10, min_lr_factor=0.25)
    assert lrs[10:] == [0.5] * 10


def test_a_warmup_longer_than_the_run_just_rises() -> None:
    assert rates(4, warmup_steps=8) == [0.25, 0.5, 0.75, 1.0]


def test_set_lr_writes_every_group() -> None:
    params = [{"params": [torch.nn.Parameter(torch.zeros(1))]} for _ in range(2)]
    optimizer = torch.optim.SGD(params, lr=1.0)
    set_lr(optimizer, 0.25)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
