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
    FRAGMENTED,
    RECOMPUTES,
    Candidate,
    Measured,
    Recompute,
    enumerate_layouts,
    estimate,
    measure,
    place_again,
    rank_candidates,
)
from torchtitan.tools.plan.command import main
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.tools.plan.step import StepTime
from torchtitan.tools.plan.tried import Tried

LARGE = [
    *("--model.dim=1024", "--model.hidden_dim=2816", "--model.num_layers=8"),
    *("--model.vocab_size=1024", "--training.seq_len=1024"),
]
"""Large enough that memory is more than small change."""


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Planned:
    return planned(tmp_path_factory.mktemp("layout"), *LARGE, world=8)


@pytest.fixture(scope="module")
def measured(job: Planned) -> Mapping[Recompute, Measured]:
    return {recompute: measure(job, recompute) for recompute in RECOMPUTES}


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


def test_the_rules_allow_what_is_tried(job: Planned) -> None:
    """The trainer's own, for every eleventh; and the step has the samples asked for."""
    for candidate in list(enumerate_layouts(job, samples=32))[::11]:
        placed = place_again(job, candidate)
        assert placed.layout.dims == candidate.dims
        assert placed.layout.samples_per_step(placed.config.training) == 32


@pytest.mark.parametrize(
    ("dims", "recompute"),
    [
        (ParallelDims(dp_shard=8), "full"),
        (ParallelDims(dp_shard=4, tp=2), "op"),
        (ParallelDims(dp_replicate=2, dp_shard=4), "2"),
        (ParallelDims(pp=2, dp_shard=4), "none"),
    ],
    ids=str,
)
def test_formulas_are_near_the_rehearsal(
    dims: ParallelDims,
    recompute: Recompute,
    job: Planned,
    measured: Mapping[Recompute, Measured],
) -> None:
    """Near enough to put good ones in front: the best few are rehearsed anyway."""
    num = 4 if dims.pp > 1 else 1
    candidate = Candidate(
        dims=dims, schedule="1F1B", microbatch=4, num_microbatches=num, recompute=recompute
    )
    memory, seconds = estimate(job, candidate, measured[recompute])
    account = replay(rehearse_rank(place_again(job, candidate), 0))
    assert (memory - ALLOWANCE) / FRAGMENTED == pytest.approx(account.active, rel=0.25)
    assert seconds > 0


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


def test_a_signal_ends_the_search_with_the_best_until_then(
    job: Planned,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = list(enumerate_layouts(job, samples=32))
    slow, fast = (replace(found[0], recompute=recompute) for recompute in ("full", "none"))

    def results(*_: object, **__: object) -> Iterator[Tried]:
        for seconds in (2.0, 1.0):
            both = (seconds, seconds)
            time = StepTime(
                worst=seconds,
                best=seconds,
                resources={"products": both},
                tokens_per_second=both,
                mfu=both,
            )
            yield Tried(memory=1, time=time)
        raise SystemExit(130)

    monkeypatch.setattr(layout, "open_pool", nullcontext)
    monkeypatch.setattr(layout, "_rank", lambda *_, **__: [slow, fast, slow])
    monkeypatch.setattr(layout, "run_in", results)
    written = tmp_path / "best.toml"
    parts: list[str] = []
    with pytest.raises(SystemExit) as ended:  # a list keeps what came before the error
        parts.extend(layout.plan_layout(job, Namespace(global_batch=32, write=written)))
    assert ended.value.code == 130
    [*_, first, second, best, file, _] = parts
    assert str(slow) in first
    assert str(fast) in second
    assert str(fast) in best
    assert str(written) in file
    assert load_config([f"--job.config_file={written}"]).activation_checkpoint.mode == "none"


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
