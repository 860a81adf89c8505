"""Candidates, the formulas that rank them, and the command."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.tools.plan.jobs import planned
from torchtitan.job import load_config
from torchtitan.mesh.dims import ParallelDims
from torchtitan.tools.plan import layout
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.candidates import (
    FRAGMENTED,
    PIPELINES,
    RECOMPUTES,
    Candidate,
    Measured,
    Pipelining,
    Recompute,
    enumerate_layouts,
    estimate,
    measure,
    rank_candidates,
)
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.layout import SLOW, Row, plan_layout
from torchtitan.tools.plan.ranks import rehearse_rank
from torchtitan.tools.plan.step import StepTime

LARGE = [
    *("--model.dim=1024", "--model.hidden_dim=2816", "--model.num_layers=14"),
    *("--model.vocab_size=1024", "--training.seq_len=1024"),
]
"""Large enough that memory is more than small change."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return planned(tmp_path_factory.mktemp("layout"), *LARGE, world=8)


@pytest.fixture(scope="module")
def measured(job: Planned) -> Mapping[Recompute, Measured]:
    return {recompute: measure(job, recompute) for recompute in RECOMPUTES}


@pytest.mark.promise("plan-formulas")
def test_every_candidate_takes_all_ranks_and_samples(job: Planned) -> None:
    """And the trainer's rules allow it, which is tried for every seventh."""
    candidates = list(enumerate_layouts(job, samples=32))
    assert len(candidates) == len(set(candidates)) > 50
    for candidate in candidates:
        assert candidate.dims.world_size == 8
        assert candidate.num_microbatches * candidate.microbatch * candidate.dims.dp == 32
    for axis in ("pp", "tp", "dp_replicate", "dp_shard"):
        assert sum(getattr(candidate.dims, axis) > 1 for candidate in candidates) > 5
    assert {candidate.recompute for candidate in candidates} == set(RECOMPUTES)
    assert {c.schedule for c in candidates if c.dims.pp > 1} == set(PIPELINES)
    for candidate in candidates[::7]:
        placed = candidate.place(job)
        assert placed.layout.dims == candidate.dims
        assert placed.layout.samples_per_step(placed.config.training) == 32
        if placed.layout.pipeline is not None:
            assert len(placed.layout.pipeline.modules) == candidate.dims.pp * candidate.stages


def test_a_model_that_tp_does_not_divide(tmp_path: Path) -> None:
    job = planned(tmp_path, "--model.vocab_size=263", world=4)
    assert {candidate.dims.tp for candidate in enumerate_layouts(job, samples=8)} == {1}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "schedule", "recompute"),
    [
        (ParallelDims(dp_shard=8), "1F1B", "full"),
        (ParallelDims(dp_shard=4, tp=2), "1F1B", "op"),
        (ParallelDims(dp_shard=2, tp=4), "1F1B", "none"),
        (ParallelDims(pp=2, dp_shard=4), "1F1B", "none"),
        (ParallelDims(pp=2, dp_shard=4), "Interleaved1F1B", "op"),
        (ParallelDims(pp=4, dp_shard=2), "ZBVZeroBubble", "none"),
    ],
    ids=str,
)
def test_formulas_are_near_the_rehearsal(
    dims: ParallelDims,
    schedule: Pipelining,
    recompute: Recompute,
    job: Planned,
    measured: Mapping[Recompute, Measured],
) -> None:
    """Near enough to put good ones in front: the best few are rehearsed anyway."""
    num = 2 * dims.pp if dims.pp > 1 else 1
    candidate = Candidate(
        dims=dims, schedule=schedule, microbatch=4, num_microbatches=num, recompute=recompute
    )
    memory, seconds = estimate(job, candidate, measured[recompute])
    placed = candidate.place(job)
    active = max(replay(rehearse_rank(placed, rank)).active for rank in placed.first_ranks())
    assert (memory - ALLOWANCE) / FRAGMENTED == pytest.approx(active, rel=0.25)
    assert seconds > 0


@pytest.mark.slow
def test_only_layouts_that_fit_are_ranked(
    job: Planned, measured: Mapping[Recompute, Measured]
) -> None:
    ranked = rank_candidates(job, samples=32, measured=measured)
    choices = {(c.dims.pp, c.dims.cp, c.dims.tp, c.dims.ep) for c in ranked}
    assert len(choices) == len(ranked)  # one for each
    candidates = enumerate_layouts(job, samples=32)
    least = min(estimate(job, c, measured[c.recompute])[0] for c in candidates)
    poor = replace(job, device=replace(job.device, memory=int(least * 1.01)))
    fitting = rank_candidates(poor, samples=32, measured=measured)
    assert 0 < len(fitting) < len(ranked)
    assert all(candidate.memory <= poor.device.memory for candidate in fitting)


def test_rows_are_sorted_by_their_rehearsed_time(
    job: Planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slow one is not shown, whatever the formulas say of it."""
    ranked = list(enumerate_layouts(job, samples=32))[:3]
    other = {"resources": {"products": (1.0, 1.0)}, "tokens_per_second": (1.0,) * 2, "mfu": (1, 1)}
    rows = [
        Row(candidate=c, memory=1, time=StepTime(worst=s * 1.2, best=s * 0.8, **other))
        for c, s in zip(ranked, (2.5, 2.0, 2.0 * SLOW * 1.01), strict=True)
    ]

    class Rows:
        def map(self, _: object, items: object, **__: object) -> list[Row] | list[None]:
            return [None] * len(RECOMPUTES) if items is RECOMPUTES else rows

    monkeypatch.setattr(layout, "open_pool", lambda _: nullcontext(Rows()))
    monkeypatch.setattr(layout, "rank_candidates", lambda *_, **__: ranked)
    written = tmp_path / "best.toml"
    text = "".join(plan_layout(job, Namespace(global_batch=32, write=written)))
    assert text.index(str(ranked[1])) < text.index(str(ranked[0]))
    assert str(ranked[2]) not in text
    best = load_config([f"--job.config_file={written}"])
    assert best.parallelism == ranked[1].apply(job.config).parallelism


@pytest.mark.promise("plan-formulas")
@pytest.mark.long
def test_the_command_writes_a_job_that_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    planned(tmp_path, world=4)
    written = tmp_path / "best.toml"
    arguments = [
        *("layout", "--world_size=4", "--global_batch=16", f"--write={written}"),
        f"--job.config_file={tmp_path / 'job.toml'}",
        *("--compile.enable=true", "--training.mixed_precision_param=auto"),
    ]
    assert main(arguments) == 0
    assert "16 samples of 64 tokens" in capsys.readouterr().out
    best = load_config([f"--job.config_file={written}"])
    assert best.training.global_batch_size == 16
    assert best.compile.enable  # though blocks are rehearsed without
    assert best.training.mixed_precision_param == "auto"
    assert main(["memory", "--world_size=4", f"--job.config_file={written}"]) == 0


@pytest.mark.long
def test_a_job_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`memory` says so, and `layout` refuses a device that no layout fits."""
    planned(tmp_path)  # writes the file
    job = [f"--job.config_file={tmp_path / 'job.toml'}", "--world_size=4", *LARGE]
    assert main(["memory", *job, "--training.local_batch_size=64", "--memory_gib=7"]) == 0
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "H100 has 7.0 GiB" in text
    assert main(["layout", *job, "--memory_gib=1"]) == 2
    assert "4 x H100" in capsys.readouterr().err
