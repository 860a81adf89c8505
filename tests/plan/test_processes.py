"""How many processes a search starts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

import pytest

from tests.plan.jobs import planned
from torchtitan.plan import layout, nearest, processes, records
from torchtitan.plan.nearest import describe_nearest, propose
from torchtitan.plan.processes import num_processes
from torchtitan.plan.step import StepTime
from torchtitan.plan.tried import Tried

NOW = Tried(
    memory=2**30,
    time=StepTime(best=1, worst=1, resources={}, tokens_per_second=(0, 0), mfu=(0, 0)),
)


@pytest.mark.parametrize(
    ("jobs", "cores", "expected"), [(3, 192, 3), (40, 192, 16), (5, 2, 2), (1, 1, 1), (0, 4, 1)]
)
def test_no_more_processes_than_jobs_cores_and_memory(
    jobs: int, cores: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "num_cores", lambda: cores)
    assert num_processes(jobs) == expected


class AskedError(Exception):
    """How many jobs a pool was asked for."""


def asked(num_jobs: int) -> NoReturn:
    raise AskedError(num_jobs)


def test_pools_are_asked_for_by_the_number_of_jobs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (layout, nearest, records):
        monkeypatch.setattr(module, "open_pool", asked)
    job = planned(tmp_path, "--parallelism.pipeline_parallel_degree=2", world=4)
    with pytest.raises(AskedError, match=f"^{len(list(propose(job)))}$"):
        describe_nearest(job, now=NOW, budget=1, expandable=True)
    with pytest.raises(AskedError, match=f"^{layout.TRIED}$"):
        layout.plan_layout(job, argparse.Namespace(global_batch=None))
    with pytest.raises(AskedError, match=r"^2$"):
        records.rehearse_ranks(job)
