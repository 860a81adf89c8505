"""Bounds of a step against sums done by hand, and what the commands say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.plan.jobs import PIPELINED, PP2, S, planned
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.devices import DEVICES, Share
from torchtitan.tools.plan.rehearse import rehearse
from torchtitan.tools.plan.step import EXPOSED, time_step
from torchtitan.tools.plan.tape import Entry, Piece, Record
from torchtitan.tools.plan.traffic import count_traffic

pytestmark = pytest.mark.slow

DEVICE = replace(
    DEVICES["H100"],
    products=Share(worst=0.6, best=0.85),
    attention=Share(worst=0.3, best=0.55),
    passes=Share(worst=0.6, best=0.9),
    launch=Share(worst=10e-6, best=4e-6),
)


def test_each_resource_by_hand(tmp_path: Path) -> None:
    """A record made up: each time is a size over a peak, and the shares bound it."""
    job = replace(planned(tmp_path, world=4), device=DEVICE)
    entries = [
        Entry("product", 10**15, ("aten::mm", "", "128x64 64x192")),
        Entry("product", 10**12, ("aten::flash_attention", "", "")),
        Entry("pass", 10**9, ("aten::mul", "")),
        Entry("message", 10**9, ("fsdp", "allgather_base", "")),
        Entry("message", 10**9, ("tp", "all_reduce", "")),
    ]
    result = time_step(job, [Record(entries, [Piece(0, "forward", 0)])])
    products = 1e15 / DEVICE.flops / (192 / 256)  # the second tile is half empty
    attention = 1e12 / DEVICE.flops
    passes = 1e9 / DEVICE.bandwidth
    # fsdp over two machines of two: half of the tensor through two adapters
    gather = 1e9 / 2 / 2 / DEVICE.network
    beside = gather / 0.5 + 30e-6, gather / 0.85 + 8e-6
    expected = {
        "products": (products / 0.6, products / 0.85),
        "attention": (attention / 0.3, attention / 0.55),
        "passes": (passes / 0.6, passes / 0.9),
        "waits": (0.0, 0.0),  # tp has one rank here
        "overlapped": beside,
        "host": (5 * 10e-6, 5 * 4e-6),
        "bubble": (0.0, 0.0),
    }
    assert {name: pytest.approx(time) for name, time in result.resources.items()} == expected
    in_turn = [
        sum(expected[name][n] for name in ("products", "attention", "passes")) for n in (0, 1)
    ]
    assert result.worst == pytest.approx(in_turn[0] + beside[0] * EXPOSED)
    assert result.best == pytest.approx(max(in_turn[1], beside[1]))
    assert result.binds == "products"
    assert result.mfu[1] == pytest.approx(100 * job.model_flops / result.best / DEVICE.flops / 4)


def test_the_bubble_is_the_schedules(tmp_path: Path) -> None:
    """1F1B over p ranks and m microbatches idles (p-1)/m of what a rank computes."""
    schedule = "--parallelism.pipeline_parallel_schedule=1F1B"
    job = planned(tmp_path, PP2, schedule, "--training.local_batch_size=16", world=2)
    assert job.shortened.layout.pipeline is not None
    num = len(job.shortened.layout.pipeline.table[0]) // 2
    assert num < 16  # fewer are rehearsed, and multiplied
    assert job.shortened.microbatches == 16 / num
    records = [
        rehearse(job.shortened.config, layout=job.shortened.layout, rank=rank) for rank in (0, 1)
    ]
    result = time_step(job, records)
    share = result.resources["bubble"][1] / (result.best - result.resources["bubble"][1])
    assert share == pytest.approx(1 / 16, rel=0.05)  # the update has none


@pytest.mark.parametrize(
    ("settings", "batch"), [([], 24), pytest.param([PP2], 12, marks=PIPELINED)]
)
def test_fewer_microbatches_have_the_peak_and_the_counts_of_all(
    settings: Sequence[str], batch: int, tmp_path: Path
) -> None:
    """The same job, of three accumulation steps, rehearsed as it is."""
    accumulated = (f"--training.global_batch_size={batch}", "--training.local_batch_size=4")
    job = planned(tmp_path, *settings, *accumulated, world=2)
    short = job.shortened
    assert short.microbatches > 1
    whole = replace(job, shortened=replace(short, layout=job.layout, microbatches=1.0, passes=1.0))
    few = rehearse(short.config, layout=short.layout, rank=0)
    every = rehearse(job.config, layout=job.layout, rank=0)
    peaks = [replay(record).active for record in (few, every)]
    # the batches themselves are all there from the beginning: tokens and labels, int64
    assert 0 <= peaks[1] - peaks[0] <= job.layout.accumulation * 2 * 4 * S * 8
    rows = count_traffic(job, few), count_traffic(whole, every)
    for counted, expected in zip(*rows, strict=True):
        assert counted[:2] == expected[:2]
        assert counted[2:] == pytest.approx(expected[2:])
