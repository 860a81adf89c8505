"""A rank that is slowed is named, whatever slows it, and nobody is where nobody is."""

from __future__ import annotations

import random
import re
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from torchtitan.metrics import stragglers
from torchtitan.metrics.meter import Meter
from torchtitan.metrics.stragglers import KINDS, Stragglers, medians_of_others

CPU = torch.device("cpu")


def make(*, num_stages: int = 1, world: int = 4, ratio: float = 2.0) -> Stragglers:
    hosts = [f"node{rank}" for rank in range(world)]
    return Stragglers(ratio=ratio, num_stages=num_stages, hosts=hosts, device=CPU)


def test_medians_of_others_are_those_of_the_standard_library() -> None:
    draw = random.Random(0)
    for num in range(2, 40):
        values = {rank: draw.choice([0.0, draw.random()]) for rank in range(0, 3 * num, 3)}
        expected = {
            rank: statistics.median([v for other, v in values.items() if other != rank])
            for rank in values
        }
        assert medians_of_others(values) == pytest.approx(expected, abs=0)
    assert medians_of_others({5: 1.0}) == {}


def test_the_greatest_ratio_of_all_kinds() -> None:
    times = [[0.0, 1.0], [0.1, 1.0], [0.0, 1.0], [0.0, 4.0]]
    assert make().find(times, step=1, step_seconds=10.0) == pytest.approx(
        {
            "slowest_rank": 3,
            "slowest_ratio": 4.0,
            "slowest_data_ratio": 10 / 9.9,
            "slowest_update_ratio": 4.0,
        }
    )


def test_waiting_for_data_is_a_part_of_the_step() -> None:
    """Others never wait: a step of 1 s would have taken 0.25 s."""
    times = [[0.0, 1.0], [0.0, 1.0], [0.75, 1.0]]
    found = make(world=3).find(times, step=1, step_seconds=1.0)
    assert (found["slowest_rank"], found["slowest_ratio"]) == (2, 4.0)
    times = [[0.5, 1.0]] * 3  # all wait alike: nobody is behind
    assert make(world=3).find(times, step=1, step_seconds=1.0)["slowest_data_ratio"] == 1


def test_updates_are_compared_within_a_pipeline_stage() -> None:
    """The first stage has five times the parameters; in the second one rank is behind."""
    times = [[0.0, update] for update in (5.0, 5.0, 5.0, 1.0, 1.0, 1.5)]
    found = make(num_stages=2, world=6).find(times, step=1, step_seconds=10.0)
    assert (found["slowest_rank"], found["slowest_ratio"]) == (5, 1.5)
    alone = make(num_stages=2, world=2).find(times[2:4], step=1, step_seconds=10.0)
    assert "slowest_update_ratio" not in alone


def test_a_rank_is_named_once_it_stays_the_slowest() -> None:
    even, uneven = [[0.0, 1.0]] * 4, [[0.0, 1.0]] * 4
    uneven[2] = [0.0, 3.0]
    other = [uneven[2], *even[:3]]
    stragglers, four = make(), [uneven] * 4

    def steps_named(rows: list[list[list[float]]]) -> list[int]:
        named = []
        for step, times in enumerate(rows, start=1):
            with jobs.listening() as lines:
                stragglers.find(times, step=step, step_seconds=10.0)
            named += [step] * len(lines)
            assert all(f"Step {step}: rank 2 (node2) takes 3.0 times" in x for x in lines)
        return named

    assert steps_named([*four, even, *four, other, *four, even]) == []
    assert steps_named([uneven] * 42) == [5, 10, 20, 40]
    assert steps_named([even, *four, uneven]) == [6]


def test_a_meter_gathers_the_time_since_the_last_report() -> None:
    now = [0.0]
    stragglers = Stragglers(
        ratio=2, num_stages=1, hosts=["a", "b"], device=CPU, clock=lambda: now[0]
    )
    meter = Meter(
        flops_per_token=1,
        peak_flops=None,
        world_size=2,
        device=CPU,
        stragglers=stragglers,
        clock=lambda: now[0],
    )
    for update in (1.0, 3.0):
        for _ in range(2):
            with meter.waiting_for_data():
                now[0] += 0.5
            with meter.updating():
                now[0] += update
            now[0] += 5
            meter.count(1)
        data, measured = meter.rank_times()
        assert (float(data), float(measured)) == (0.5, update)
        # of two ranks, the other one updates in an eighth of the time
        both = [torch.stack([own, own / 8]) for own in (data, measured)]
        row = meter.report(2, figures={}, rank_times=both)
        assert (row["slowest_rank"], row["slowest_update_ratio"]) == (0, 8)
        assert not [name for name in row if "rank_times" in name]


class Device:
    """A device that ends an update late: until the host waits for it, its events have no time."""

    def __init__(self) -> None:
        self.now, self.num_ended = 0.0, 0
        self.events: list[Event] = []

    def event(self, *, enable_timing: bool) -> Event:
        assert enable_timing
        self.events.append(Event(self))
        return self.events[-1]


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, device: Device) -> None:
        self.device, self.at = device, 0.0

    def record(self) -> None:
        self.at = self.device.now

    def synchronize(self) -> None:
        self.device.num_ended = self.device.events.index(self) + 1

    def elapsed_time(self, end: Event) -> float:
        assert self.device.events.index(end) < self.device.num_ended, "not ready"
        return 1e3 * (end.at - self.at)


def test_on_a_gpu_the_host_waits_for_no_update_that_was_just_launched(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The logged step's update counts for the next row."""
    device = Device()
    monkeypatch.setattr(torch.cuda, "Event", device.event)
    monkeypatch.setattr(stragglers, "to_device", lambda values, _: torch.tensor(values))
    one = Stragglers(ratio=2, num_stages=1, hosts=["a", "b"], device=torch.device("cuda"))
    found = []
    for updates in ([1.0], [3.0], [5.0, 2.0, 8.0], [0.5, 0.5]):
        for seconds in updates:
            with one.updating():
                device.now += seconds
            device.now += 7  # forward and backward
        found.append([float(x) for x in one.measure(data_seconds=6.0, num_steps=len(updates))])
        assert device.num_ended <= len(device.events) - 2
    wanted = [[6.0, 0.0], [6.0, 1.0], [2.0, 10 / 3], [3.0, 4.25]]
    assert found == [pytest.approx(row, abs=1e-9) for row in wanted]


def train_slowed(job: list[str], slowed: str) -> tuple[list[str], dict[str, Any]]:
    """Train with rank 1 slowed; return the warnings and the last row, as each rank has them.

    What is measured is planted: on a busy machine any rank may be slow.
    """
    seconds = dict.fromkeys(KINDS, 1.0)
    if dist.get_rank() == 1 and slowed in KINDS:
        seconds[slowed] = 1e6  # longer than any step: data are compared with its time

    def measure(self: Stragglers, *, data_seconds: float, num_steps: int) -> list[torch.Tensor]:
        return list(torch.tensor([*seconds.values()], dtype=torch.float64).unbind())

    with pytest.MonkeyPatch.context() as patch, jobs.listening() as lines:
        patch.setattr(Stragglers, "measure", measure)
        trainer = jobs.Trainer(jobs.start(job))
        trainer.train()
        trainer.close()
    assert trainer.last_row is not None
    return [line for line in lines if " (" in line and " times " in line], trainer.last_row


@pytest.mark.slow
@pytest.mark.parametrize(
    ("slowed", "layout"),
    [
        ("data", ("--parallelism.pipeline_parallel_degree=2",)),
        ("update", ("--parallelism.pipeline_parallel_degree=2",)),
        ("nothing", ()),
    ],
)
def test_a_slowed_rank_is_named(
    slowed: str, layout: tuple[str, ...], ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), UNSAVED, *layout, "--training.steps=5"]
    answers = ranks.run(train_slowed, [*job, "--metrics.log_freq=1"], slowed, world=4)
    for warnings, row in answers:
        if slowed == "nothing":
            assert warnings == []
            assert row["slowest_ratio"] == 1
            continue
        work = {"data": "waiting for data", "update": "optimizer updates"}[slowed]
        pattern = rf"rank 1 \(.+\) takes [\d.]+ times .* in {work}, .* 5 logged steps"
        assert len(warnings) == 1
        assert re.search(pattern, warnings[0]), warnings
        assert row["slowest_rank"] == 1
        assert row[f"slowest_{slowed}_ratio"] == row["slowest_ratio"]
