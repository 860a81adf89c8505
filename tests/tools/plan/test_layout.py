"""Layouts that are tried, what formulas say of them, and the command."""

from __future__ import annotations

from argparse import Namespace
from collections import Counter
from collections.abc import Iterator, Mapping
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
    PIPELINES,
    RECOMPUTES,
    Candidate,
    Pipelining,
    Recompute,
    enumerate_layouts,
    place_again,
)
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.formulas import (
    FRAGMENTED,
    Measured,
    _bubble,
    _ranks,
    between,
    estimate,
    measure,
    rank_candidates,
)
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.layout import MEASURED, SKIPPING, SLOW, Row, plan_layout
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
    found = {recompute: measure(job, recompute) for recompute in MEASURED}
    for one in SKIPPING:
        found[one] = between(found["none"], found["full"], share=1 / int(one))
    return found


@pytest.mark.promise("plan-formulas")
def test_every_candidate_takes_all_ranks_and_the_same_samples(job: Planned) -> None:
    found = list(enumerate_layouts(job, samples=32))
    assert len(found) == len(set(found)) > 50
    for candidate in found:
        assert candidate.dims.world_size == 8
        assert candidate.num_microbatches * candidate.microbatch * candidate.dims.dp == 32
    axes = Counter(
        axis
        for candidate in found
        for axis in ("pp", "tp", "dp_replicate", "dp_shard")
        if getattr(candidate.dims, axis) > 1
    )
    assert min(axes.values()) > 5
    assert {candidate.recompute for candidate in found} == set(RECOMPUTES)
    assert {(one.schedule, one.stages) for one in found if one.dims.pp > 1} == set(PIPELINES)


@pytest.mark.promise("plan-formulas")
def test_the_rules_allow_what_is_tried(job: Planned) -> None:
    """The trainer's own, for every eleventh; and the step has the samples asked for."""
    for candidate in list(enumerate_layouts(job, samples=32))[::11]:
        placed = place_again(job, candidate)
        assert placed.layout.dims == candidate.dims
        assert placed.layout.samples_per_step(placed.config.training) == 32
        if placed.layout.pipeline is not None:
            assert len(placed.layout.pipeline.modules) == candidate.dims.pp * candidate.stages


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dims", "schedule", "stages", "recompute"),
    [
        (ParallelDims(dp_shard=8), "1F1B", 1, "full"),
        (ParallelDims(dp_shard=8), "1F1B", 1, "4"),
        (ParallelDims(dp_shard=4, tp=2), "1F1B", 1, "op"),
        (ParallelDims(dp_shard=2, tp=4), "1F1B", 1, "none"),
        (ParallelDims(dp_replicate=2, dp_shard=4), "1F1B", 1, "2"),
        (ParallelDims(pp=2, dp_shard=4), "1F1B", 1, "none"),
        (ParallelDims(pp=2, dp_shard=4), "Interleaved1F1B", 4, "op"),
        (ParallelDims(pp=4, dp_shard=2), "ZBVZeroBubble", 2, "none"),
    ],
    ids=str,
)
def test_formulas_are_near_the_rehearsal(
    dims: ParallelDims,
    schedule: Pipelining,
    stages: int,
    recompute: Recompute,
    job: Planned,
    measured: Mapping[Recompute, Measured],
) -> None:
    """Near enough to put good ones in front: the best few are rehearsed anyway."""
    candidate = Candidate(
        dims=dims,
        schedule=schedule,
        stages=stages,
        microbatch=4,
        num_microbatches=2 * dims.pp if dims.pp > 1 else 1,
        recompute=recompute,
        layers_per_stage=2 if stages == 4 else None,
    )
    memory, seconds = estimate(job, candidate, measured[recompute])
    placed = place_again(job, candidate)
    active = max(replay(rehearse_rank(placed, rank)).active for rank in placed.first_ranks())
    assert (memory - ALLOWANCE) / FRAGMENTED == pytest.approx(active, rel=0.25)
    assert seconds > 0


@pytest.mark.parametrize("stages", [2, 4])
def test_formulas_know_the_layers_of_each_rank(stages: int, tmp_path: Path) -> None:
    """Also if the job sets how many layers embedding and head count as."""
    ends = [
        f"--parallelism.pipeline_parallel_{end}_stage_less_layers=2" for end in ("first", "last")
    ]
    job = planned(tmp_path, *LARGE, *ends, world=8)
    found = [
        candidate
        for candidate in enumerate_layouts(job, samples=32)
        if (candidate.schedule, candidate.stages) == ("Interleaved1F1B", stages)
    ]
    assert {candidate.dims.pp for candidate in found} == ({2, 4} if stages == 2 else {2})
    for pp in {candidate.dims.pp for candidate in found}:
        candidate = next(one for one in found if one.dims.pp == pp)
        pipeline = place_again(job, candidate).layout.pipeline
        assert pipeline is not None
        layers = [
            sum(
                "layers" in name
                for stage in pipeline.stages_of(rank)
                for name in pipeline.modules[stage]
            )
            for rank in range(pp)
        ]
        ranks = _ranks(job, candidate)
        assert {rank.layers for rank in ranks} <= set(layers)
        assert max(rank.layers for rank in ranks) == max(layers)
        assert _bubble(candidate) == (pp - 1) / stages


def test_what_does_not_fit_is_left_out(
    job: Planned, measured: Mapping[Recompute, Measured]
) -> None:
    ranked = rank_candidates(job, samples=32, measured=measured)
    choices = {(one.dims.pp, one.dims.cp, one.dims.tp, one.dims.ep) for one in ranked}
    assert len(choices) == len(ranked)  # one for each
    needs = [
        estimate(job, candidate, measured[candidate.recompute])[0]
        for candidate in enumerate_layouts(job, samples=32)
    ]
    poor = replace(job, device=replace(job.device, memory=int(min(needs) * 1.01)))
    fitting = rank_candidates(poor, samples=32, measured=measured)
    assert 0 < len(fitting) < len(ranked)
    assert all(candidate.memory <= poor.device.memory for candidate in fitting)


def test_a_model_that_tp_does_not_divide(tmp_path: Path) -> None:
    job = planned(tmp_path, "--model.vocab_size=263", world=4)
    assert {candidate.dims.tp for candidate in enumerate_layouts(job, samples=8)} == {1}


def _time(middle: float) -> StepTime:
    return StepTime(
        worst=middle * 1.2,
        best=middle * 0.8,
        resources={"products": (1.0, 1.0)},
        tokens_per_second=(1.0, 1.0),
        mfu=(1.0, 1.0),
    )


def test_rows_are_sorted_by_their_rehearsed_time(
    job: Planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A slow one is not shown, whatever the formulas say of it."""
    middles = {1: 2.5, 2: 2.0, 4: 2.0 * SLOW * 1.01}
    ranked = [one for one in enumerate_layouts(job, samples=32) if one.dims.pp == one.dims.tp == 1]
    ranked = [next(one for one in ranked if one.dims.dp_replicate == n) for n in (1, 2, 4)]
    assert len(ranked) == 3

    class Ordered:
        def imap_unordered(self, *_: object) -> Iterator[Row]:
            for one in ranked:
                yield Row(candidate=one, memory=1, time=_time(middles[one.dims.dp_replicate]))

    monkeypatch.setattr(layout, "open_pool", lambda _: nullcontext(Ordered()))
    monkeypatch.setattr(layout, "_measure_all", lambda *_: {})
    monkeypatch.setattr(layout, "rank_candidates", lambda *_, **__: ranked)
    written = tmp_path / "best.toml"
    text = "".join(plan_layout(job, Namespace(global_batch=32, write=written)))
    assert str(ranked[0]) in text
    assert text.index(str(ranked[1])) < text.index(str(ranked[0]))
    assert str(ranked[2]) not in text
    again = load_config([f"--job.config_file={written}"])
    assert again.parallelism == ranked[1].apply(job.config).parallelism


def test_a_signal_ends_the_search_with_the_best_so_far(
    job: Planned, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    slow, fast, *_ = enumerate_layouts(job, samples=32)

    class Stopped:
        def imap_unordered(self, *_: object) -> Iterator[Row]:
            yield Row(candidate=slow, memory=1, time=_time(2.5))
            yield Row(candidate=fast, memory=1, time=_time(2.0))
            raise SystemExit(130)

    monkeypatch.setattr(layout, "open_pool", lambda _: nullcontext(Stopped()))
    monkeypatch.setattr(layout, "_measure_all", lambda *_: {})
    monkeypatch.setattr(layout, "rank_candidates", lambda *_, **__: [slow, fast])
    written = tmp_path / "best.toml"
    parts: list[str] = []
    with pytest.raises(SystemExit) as ended:  # a list keeps what came before the error
        parts.extend(plan_layout(job, Namespace(global_batch=32, write=written)))
    assert ended.value.code == 130
    text = "".join(parts)
    assert text.index(str(fast)) < text.index(str(slow))
    again = load_config([f"--job.config_file={written}"])
    assert again.parallelism == fast.apply(job.config).parallelism


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
    out = capsys.readouterr().out
    assert "16 samples of 64 tokens" in out
    again = load_config([f"--job.config_file={written}"])
    assert again.training.global_batch_size == 16
    assert again.compile.enable  # though blocks are rehearsed without
    assert again.training.mixed_precision_param == "auto"
    assert main(["memory", "--world_size=4", f"--job.config_file={written}"]) == 0


@pytest.mark.long
def test_nothing_fits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    planned(tmp_path, world=4)
    arguments = [
        *("layout", "--world_size=4", "--memory_gib=1"),
        f"--job.config_file={tmp_path / 'job.toml'}",
    ]
    assert main(arguments) == 2
    assert "4 x H100" in capsys.readouterr().err
