"""Variants of a job, rehearsed as `memory` and `step` do, several at once.

Each is rehearsed in a process of its own, since one process can pretend one world at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.pool import Pool

from torchtitan.base.errors import ConfigError
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.job import Sent
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.tools.plan.step import StepTime, time_step


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a rehearsal tells of a job."""

    memory: int
    """Bytes that the fullest rank needs."""
    time: StepTime


def try_jobs(
    jobs: Sequence[Sent], *, pool: Pool, expandable: bool = True
) -> Iterator[Tried | None]:
    """Rehearse jobs, in their order; None: the rules do not allow one.

    `expandable`: whether segments of the allocator can grow.
    """
    try_one = partial(_try_job, expandable=expandable)
    for number, tried in enumerate(pool.imap(try_one, jobs), start=1):
        if sys.stderr.isatty():
            sys.stderr.write(f"\rrehearsed {number} of at most {len(jobs)} layouts")
        yield tried


def _try_job(job: Sent, *, expandable: bool) -> Tried | None:
    try:
        planned = job.place()
    except ConfigError:
        return None
    records = [rehearse_rank(planned, rank) for rank in planned.first_ranks()]
    memory = max(replay(record, expandable=expandable).needed for record in records)
    return Tried(memory=memory, time=time_step(planned, records))
