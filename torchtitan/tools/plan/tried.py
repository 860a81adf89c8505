"""Memory and step time of variants of a job, several rehearsed at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool

from torchtitan.base.errors import ConfigError
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.job import Sent
from torchtitan.tools.plan.records import rehearse_rank, run_in
from torchtitan.tools.plan.step import StepTime, time_step


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Memory and time of a rehearsed job."""

    memory: int
    """Bytes that the fullest rank needs."""
    time: StepTime


def try_jobs(
    jobs: Sequence[Sent], *, pool: Pool, of: str, expandable: bool = True
) -> Iterator[Tried | None]:
    """Rehearse jobs and yield their figures in order, or None for a job that the rules forbid.

    Args:
        of: Name of the jobs in progress reports.
        expandable: Whether segments of the allocator can grow.
    """
    yield from run_in(pool, partial(_try_job, expandable=expandable), jobs, of=of)


def _try_job(job: Sent, *, expandable: bool) -> Tried | None:
    try:
        planned = job.place()
    except ConfigError:
        return None
    records = [rehearse_rank(planned, rank) for rank in planned.first_ranks()]
    memory = max(replay(record, expandable=expandable).needed for record in records)
    return Tried(memory=memory, time=time_step(planned, records))
