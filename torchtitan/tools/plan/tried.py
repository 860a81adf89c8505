"""Memory and step time of a variant of a job."""

from __future__ import annotations

from dataclasses import dataclass

from torchtitan.base.errors import ConfigError
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.job import Sent
from torchtitan.tools.plan.records import rehearse_rank
from torchtitan.tools.plan.step import StepTime, time_step


@dataclass(frozen=True, kw_only=True)
class Tried:
    """Memory and time of a rehearsed job."""

    memory: int
    """Bytes that the fullest rank needs."""
    time: StepTime


def try_job(job: Sent) -> Tried | None:
    """Rehearse a job in this process. Return None if the rules forbid it."""
    try:
        planned = job.place()
    except ConfigError:
        return None
    records = [rehearse_rank(planned, rank) for rank in planned.first_ranks()]
    memory = max(replay(record).needed for record in records)
    return Tried(memory=memory, time=time_step(planned, records))
