"""A variant that is tried needs what its fullest rank needs, wherever that is."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.distributed.pipeline_jobs import pipeline
from tests.tools.plan.jobs import planned
from torchtitan.tools.plan import records
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.job import Planned, send
from torchtitan.tools.plan.records import rehearse_rank, rehearse_ranks
from torchtitan.tools.plan.tried import Tried, try_jobs

WIDE = ("--model.dim=512", "--model.hidden_dim=1024")
PP6 = (*pipeline("1F1B", pp=6), "--training.local_batch_size=12")
UNEVEN = "--parallelism.module_fqns_per_model_part="
SIX = (
    '[["tok_embeddings","layers.0"],["layers.1"],["layers.2"],["layers.3","layers.4","layers.5"],'
    '["layers.6"],["layers.7","norm","output"]]'
)
JOBS: dict[str, tuple[int, tuple[str, ...]]] = {
    "1F1B": (6, PP6),
    "GPipe": (6, (*pipeline("GPipe", pp=6), "--training.local_batch_size=12")),
    "the fourth rank holds most blocks": (6, (*PP6, UNEVEN + SIX)),
    "the fourth rank, recomputed": (
        6,
        (*PP6, UNEVEN + SIX, "--activation_checkpoint.mode=full", "--model.vocab_size=8"),
    ),
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


def needed(job: Planned, *, expandable: bool = True) -> dict[int, int]:
    """Return the bytes that each rank needs."""
    return {
        rank: replay(rehearse_rank(job, rank), expandable=expandable).needed
        for rank in range(job.world_size)
    }


def tried(job: Planned, *, expandable: bool = True) -> Tried:
    with ThreadPool(1) as pool:
        sent = send(job.config, job)
        [one] = try_jobs([sent], pool=pool, of="jobs", expandable=expandable)
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


def test_each_rank_is_rehearsed_on_one_core(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 1)
    job = planned(tmp_path, *pipeline("1F1B"), world=2)
    of_each = rehearse_ranks(job)
    assert [replay(record, expandable=True).needed for record in of_each] == [*needed(job).values()]


def test_the_allocator_is_the_one_asked_for(tmp_path: Path) -> None:
    job = planned(tmp_path, *WIDE, "--training.seq_len=448", world=2)
    needs = {expandable: needed(job, expandable=expandable)[0] for expandable in (True, False)}
    assert needs[True] < needs[False]
    for expandable, size in needs.items():
        assert tried(job, expandable=expandable).memory == size


@pytest.mark.parametrize(
    ("jobs", "cores", "expected"), [(3, 192, 3), (40, 192, 16), (5, 2, 2), (0, 4, 1)]
)
def test_no_more_processes_than_jobs_cores_and_memory(
    jobs: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def pool(num: int, *_: object) -> AbstractContextManager[None]:
        asked.append(num)
        return nullcontext()

    context = SimpleNamespace(Pool=pool)
    monkeypatch.setattr(records, "num_cores", lambda: cores)
    monkeypatch.setattr(records.multiprocessing, "get_context", lambda _: context)
    with records.open_pool(jobs):
        assert asked == [expected]
