"""A job that loses a node and gets it back: two launchers on this machine, one of them killed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from scripts.campaign import CampaignError
from scripts.node_campaign import (
    CASES,
    ElasticRun,
    compare,
    lose_and_return,
    losses,
    samples,
    signal_rank,
)

pytestmark = pytest.mark.long

SECONDS = 240


@pytest.mark.promise("resume-elsewhere")
def test_two_nodes_one_two(tmp_path: Path) -> None:
    """The first node is killed: rank 0 with its log, its figures and the store of the ranks."""
    run = ElasticRun(folder=tmp_path, fewest=1, nodes=2, steps=45, seconds=SECONDS)
    try:
        lose_and_return(run, victim=0)
        compare(run.results, run.train_undisturbed(steps=45, ranks=1))
    finally:
        run.close()
    assert run.starts() == [2, 1, 2]


def test_a_rank_that_crashes_is_started_again(tmp_path: Path) -> None:
    run = ElasticRun(folder=tmp_path, fewest=1, nodes=2, steps=20, seconds=SECONDS)
    try:
        signal_rank(run, CASES["crash"])
        compare(run.results, run.train_undisturbed(steps=20, ranks=1))
    finally:
        run.close()
    assert run.starts() == [2, 2]


def without_one(rows: list[str]) -> list[str]:
    return rows[:-1]


def with_one_twice(rows: list[str]) -> list[str]:
    return [*rows, rows[-1]]


def with_another_step(rows: list[str]) -> list[str]:
    last = json.loads(rows[-1])
    return [*rows[:-1], json.dumps({**last, "step": last["step"] + 1})]


@pytest.mark.parametrize("harm", [without_one, with_one_twice, with_another_step])
def test_the_campaign_sees_lost_and_doubled_samples(
    harm: Callable[[list[str]], list[str]], tmp_path: Path
) -> None:
    rows = [json.dumps({"index": k, "step": 1 + k // 4, "hash": f"{k}"}) for k in range(16)]
    for name in ("whole", "harmed"):
        (tmp_path / name / "samples").mkdir(parents=True)
        (tmp_path / name / "samples" / "rank_0.jsonl").write_text("\n".join(rows))
        (tmp_path / name / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    assert compare(tmp_path / "harmed", tmp_path / "whole") == 0
    (tmp_path / "harmed" / "samples" / "rank_0.jsonl").write_text("\n".join(harm(rows)))
    with pytest.raises(CampaignError, match="samples"):
        compare(tmp_path / "harmed", tmp_path / "whole")
    assert len(samples(tmp_path / "whole")) == 16
    assert losses(tmp_path / "whole") == {1: 2.0}


def launch(tmp_path: Path, *overrides: str) -> tuple[int, str]:
    """Start one node alone, which must end by itself; return its code and what it says."""
    run = ElasticRun(
        folder=tmp_path,
        fewest=1,
        nodes=2,
        steps=2,
        seconds=SECONDS,
        options=overrides,
        max_restarts=0,
    )
    try:
        run.start_node(0)
        return run.launchers[0].wait(SECONDS), run.output
    finally:
        run.close()


def test_a_job_without_checkpoints_is_refused(tmp_path: Path) -> None:
    code, said = launch(tmp_path, "--checkpoint.enable=false")
    assert code == 2
    assert "checkpoint.enable" in said
    assert "Traceback" not in said
