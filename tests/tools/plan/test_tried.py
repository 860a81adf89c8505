"""A variant that is tried needs what its fullest rank needs, wherever that is."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.pipeline_jobs import pipeline
from tests.tools.plan.jobs import planned
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.job import Planned, send
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.tools.plan.tried import Tried, try_job

WIDE = ("--model.dim=512", "--model.hidden_dim=1024")
PP6 = (*pipeline("1F1B", pp=6), "--training.local_batch_size=12")
UNEVEN = "--parallelism.module_fqns_per_model_part="
SIX = (
    '[["tok_embeddings","layers.0"],["layers.1"],["layers.2"],["layers.3","layers.4","layers.5"],'
    '["layers.6"],["layers.7","norm","output"]]'
)
JOBS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1F1B": (6, PP6),
    "the fourth rank holds most blocks": (6, (*PP6, UNEVEN + SIX)),
    "ZBVZeroBubble": (
        6,
        (
            *pipeline("ZBVZeroBubble", pp=6),
            *("--training.local_batch_size=24", "--model.num_layers=12"),
        ),
    ),
}


@pytest.fixture(autouse=True)
def says_all() -> Iterator[None]:
    """What is tried is silent, in a process of its own; here it is in this one."""
    yield
    logging.disable(logging.NOTSET)


def needed(job: Planned) -> dict[int, int]:
    """Return the bytes that each rank needs."""
    return {rank: replay(rehearse_rank(job, rank)).needed for rank in range(job.world_size)}


def tried(job: Planned) -> Tried:
    one = try_job(send(job.config, job))
    assert one is not None
    return one


@pytest.mark.parametrize("name", JOBS)
def test_the_fullest_rank_is_looked_at(name: str, tmp_path: Path) -> None:
    world, arguments = JOBS[name]
    job = planned(tmp_path, *WIDE, *arguments, world=world)
    of_each = needed(replace(job, pipeline_ranks=range(world)))
    assert max(of_each[rank] for rank in job.pipeline_ranks) == max(of_each.values()), of_each
    assert len(job.pipeline_ranks) <= 4


def test_a_rank_in_the_middle_may_need_most(tmp_path: Path) -> None:
    parts = (
        '[["tok_embeddings","layers.0"],["layers.1","layers.2","layers.3","layers.4"],'
        '["layers.5","layers.6"],["layers.7","norm","output"]]'
    )
    arguments = (*pipeline("1F1B", pp=4), "--training.local_batch_size=8", UNEVEN + parts)
    job = planned(tmp_path, *WIDE, *arguments, world=4)
    of_each = needed(job)
    assert max(of_each, key=lambda rank: of_each[rank]) == 1
    assert tried(job).memory == of_each[1]
