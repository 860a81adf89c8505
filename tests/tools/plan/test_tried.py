"""A variant that is tried needs what its fullest rank needs, wherever that is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.jobs import pipeline
from tests.tools.plan.jobs import planned
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.job import send
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.tools.plan.tried import try_job

pytestmark = pytest.mark.slow

UNEVEN = "--parallelism.module_fqns_per_model_part="
PARTS = (
    '[["tok_embeddings","layers.0"],["layers.1"],["layers.2","layers.3","layers.4"],["layers.5"],'
    '["layers.6","norm","output"]]'
)
JOBS = {
    "the third rank holds most blocks": (
        *(*pipeline("1F1B", pp=5), UNEVEN + PARTS),
        *("--training.local_batch_size=5", "--model.num_layers=7"),
    ),
    "ZBVZeroBubble": (
        *pipeline("ZBVZeroBubble", pp=5),
        *("--training.local_batch_size=10", "--model.num_layers=10"),
    ),
}


@pytest.mark.usefixtures("in_process")
@pytest.mark.parametrize("name", JOBS)
def test_the_fullest_rank_is_looked_at(name: str, tmp_path: Path) -> None:
    wide = ("--model.dim=512", "--model.hidden_dim=1024")
    job = planned(tmp_path, *wide, *JOBS[name], world=5)
    of_each = [replay(rehearse_rank(job, rank)).needed for rank in range(5)]
    fullest = max(of_each)
    assert max(of_each[rank] for rank in job.pipeline_ranks) == fullest, of_each
    assert len(job.pipeline_ranks) <= 4
    if name != "ZBVZeroBubble":
        assert of_each.index(fullest) == 2
        found = try_job(send(job.config, job))
        assert found is not None
        assert found.memory == fullest
        assert try_job(send(job.config, job), limit=fullest) == found
        assert try_job(send(job.config, job), limit=fullest - 1) is None
