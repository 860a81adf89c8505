"""A job that loses a node and gets it back: two launchers on this machine, one of them killed."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts.node_campaign import (
    ElasticRun,
    compare,
    lose_and_return,
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
