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


def try_job(job: Sent, *, limit: int | None = None) -> Tried | None:
    """Rehearse a job in this process. Return None if the rules forbid it.

    None also as soon as a rank needs more than `limit` bytes.
    """
    try:
        planned = job.place()
    except ConfigError:
        return None
    ranks, pipeline = planned.first_ranks(), planned.layout.pipeline
    if pipeline is not None and pipeline.splits_backward:
        ranks.reverse()  # the last rank waits longest with gradients of weights
    records, memory = [], 0
    for rank in ranks:
        records.append(rehearse_rank(planned, rank))
        memory = max(memory, replay(records[-1]).needed)
        if limit is not None and memory > limit:
            return None
    return Tried(memory=memory, time=time_step(planned, records))
