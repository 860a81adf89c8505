from __future__ import annotations

import math
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.base.device import PeakFlops
from torchtitan.metrics import meter as meter_module
from torchtitan.metrics.meter import Meter

CPU = torch.device("cpu")


class Clock:
    """A clock that a test winds by hand, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def meter(clock: Clock) -> Meter:
    return Meter(flops_per_token=3e6, peak_flops=1e9, world_size=4, device=CPU, clock=clock)


def _step(meter: Meter, clock: Clock, *, data: float, compute: float, num_tokens: int) -> None:
    with meter.waiting_for_data():
        clock.now += data
    clock.now += compute
    meter.count(num_tokens)


def test_later_reports_average_over_their_interval(meter: Meter, clock: Clock) -> None:
    _step(meter, clock, data=50, compute=50, num_tokens=800)
    meter.report(1, figures={})
    for tokens in (700, 800, 900):
        _step(meter, clock, data=0.5, compute=1.5, num_tokens=tokens)
    row = meter.report(4, figures={})
    assert row["step"] == 4
    assert row["tokens_per_second"] == 2400 / 6
    assert row["tokens_per_second_per_device"] == 100
    assert row["tflops_per_device"] == pytest.approx(100 * 3e6 / 1e12)
    assert row["mfu"] == pytest.approx(100 * (400 * 3e6) / (4 * 1e9))  # over all devices: 30 %
    assert row["step_time_s"] == 2
    assert row["data_time_s"] == 0.5


def test_figures_arrive_in_order_and_in_full(meter: Meter, clock: Clock) -> None:
    loss = torch.tensor(10.123456789, dtype=torch.float32)
    norm = torch.tensor([1 / 3], dtype=torch.float64)
    _step(meter, clock, data=0, compute=1, num_tokens=1)
    row = meter.report(
        7,
        figures={
            "loss": loss,
            "max_loss": torch.tensor(2.5, dtype=torch.bfloat16),
            "grad_norm": norm.requires_grad_(),
            "lr": 3e-4,
            "num_tokens": torch.tensor(2**40 + 1),
            "valid_token_fraction": 1.0,
            "counts": torch.tensor([3, 0]),
            "loads": torch.tensor([1.5, torch.nan]),
        },
    )
    assert (row["counts"], row["loads"]) == ([3, 0], [1.5, None])
    assert list(row)[:7] == [
        *("step", "loss", "max_loss", "grad_norm", "lr", "num_tokens", "valid_token_fraction"),
    ]
    (exact,) = struct.unpack("<f", struct.pack("<f", 10.123456789))
    assert row["loss"] == exact
    assert row["max_loss"] == 2.5
    assert row["grad_norm"] == 1 / 3
    assert row["lr"] == 3e-4
    assert row["num_tokens"] == 2**40 + 1
    assert isinstance(row["num_tokens"], int)


def test_report_copies_once_and_steps_never(
    meter: Meter, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("tolist", "item", "cpu", "numpy", "__float__", "__int__", "__bool__"):
        original = getattr(torch.Tensor, name)

        def spy(tensor: torch.Tensor, *, name: str = name, original=original) -> object:
            calls.append(name)
            return original(tensor)

        monkeypatch.setattr(torch.Tensor, name, spy)
    for _ in range(3):
        _step(meter, clock, data=0, compute=1, num_tokens=1)
    assert calls == []
    meter.report(3, figures={name: torch.tensor(1.0) for name in ("loss", "max_loss", "norm")})
    assert calls == ["tolist"]


def test_what_is_no_figure_is_none(clock: Clock) -> None:
    meter = Meter(flops_per_token=3e6, peak_flops=None, world_size=4, device=CPU, clock=clock)
    _step(meter, clock, data=0, compute=1, num_tokens=100)
    figures = {"loss": torch.tensor(math.nan), "max_loss": torch.tensor(-math.inf)}
    row = meter.report(1, figures=figures)
    assert [row[name] for name in ("loss", "max_loss", "mfu")] == [None, None, None]
    assert row["tflops_per_device"] == 25 * 3e6 / 1e12


def train_with_a_blank_step(job: list[str]) -> tuple[list[dict[str, Any]], list[str]]:
    """Train with no label in step 2; return the rows that reach a sink, and the warnings."""
    run, rows = jobs.start(job), list[dict[str, Any]]()
    draw = type(run.loader).__next__

    class Rows:
        def write(self, row: dict[str, Any]) -> None:
            rows.append(row)

        def close(self) -> None: ...

    def blank(loader: object) -> list[dict[str, torch.Tensor]]:
        microbatches = draw(loader)
        for samples in microbatches if run.progress.step == 1 else ():
            samples["labels"].fill_(-100)
        return microbatches

    with pytest.MonkeyPatch.context() as patch, jobs.listening() as lines:
        patch.setattr(type(run.loader), "__next__", blank)
        trainer = jobs.Trainer(replace(run, sinks=[*run.sinks, Rows()]))
        trainer.train()
        trainer.close()
    return rows, [line for line in lines if "has no loss" in line]


@pytest.mark.promise("loss")
@pytest.mark.parametrize("layout", [(), ("--parallelism.pipeline_parallel_degree=2",)])
def test_a_step_without_labels_has_no_loss(
    layout: tuple[str, ...], ranks: RankPool, tmp_path: Path
) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=3", "--checkpoint.enable=false", *layout]
    for rows, told in ranks.run(train_with_a_blank_step, job, world=2):
        assert [row["loss"] is None for row in rows] == [False, True, False]
        assert [row["max_loss"] is None for row in rows] == [False, True, False]
        assert all(row["max_loss"] >= row["loss"] > 1 for row in (rows[0], rows[2]))
        assert (rows[1]["grad_norm"], rows[1]["valid_token_fraction"]) == (0.0, 0.0)
        assert all(row["mfu"] is None for row in rows)  # a CPU
        assert len(told) == 1
        assert "Step 2 " in told[0]
    assert [row["loss"] for row in jobs.read_rows(tmp_path / "run")] == [
        row["loss"] for row in rows
    ]


def mfu_of_unequal_devices(job: list[str]) -> tuple[float, float]:
    """Train on devices whose peaks differ; return this rank's MFU and its TFLOP/s."""
    peak = PeakFlops(value=[1e12, 3e12][dist.get_rank()], source="a test")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(meter_module, "peak_flops", lambda device, dtype: peak)
        trainer = jobs.Trainer(jobs.start(job))
        trainer.train()
        trainer.close()
    assert trainer.last_row is not None
    return trainer.last_row["mfu"], trainer.last_row["tflops_per_device"]


@pytest.mark.promise("tools")
def test_mfu_is_of_the_peaks_of_all_devices(ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), "--training.steps=1", "--checkpoint.enable=false"]
    for mfu, tflops in ranks.run(mfu_of_unequal_devices, job, world=2):
        assert mfu == pytest.approx(100 * tflops / 2)
