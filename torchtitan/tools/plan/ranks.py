"""Rehearse ranks in parallel processes: one process can be a rank of one world at a time.

Processes are forked from a server that has imported torch, which takes seconds.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from multiprocessing.pool import Pool

from torchtitan.data.prepare import num_cores
from torchtitan.data.workers import worker_context
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.rehearse import rehearse
from torchtitan.tools.plan.tape import Record

MOST = 16
"""Largest number of processes. Each takes about 0.4 GiB."""


@contextmanager
def open_pool(num_jobs: int) -> Iterator[Pool]:
    """Start processes for a number of rehearsals, and end them with the context."""
    num = max(1, min(num_jobs, num_cores(), MOST))
    context = worker_context(preload="torchtitan.tools.plan.ranks")
    with context.Pool(num, _start_worker) as pool:
        yield pool


def _start_worker() -> None:
    """Let the pool end this process, which inherits the signals that the server blocks. Ctrl-C
    stays blocked: the parent handles it. Warnings about settings are not repeated."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    logging.disable(logging.WARNING)


def rehearse_rank(
    planned: Planned, rank: int, title: str = "", *, validates: bool = True
) -> Record:
    """Return the record of a step of one rank and, with `validates`, of the job's validation."""
    config, layout = planned.shortened.config, planned.shortened.layout
    if not validates:
        config = replace(config, validation=replace(config.validation, enable=False))
    return rehearse(config, layout=layout, rank=rank, title=title)


def rehearse_ranks(planned: Planned, *, validates: bool = True) -> list[Record]:
    """Return the record of the first rank of each planned pipeline rank, in order.

    `validates` adds the validation, which takes memory but no time of a step.
    """
    ranks = planned.first_ranks()
    titles = [f"pipeline rank {number}" for number in planned.pipeline_ranks]
    work = partial(rehearse_rank, planned, validates=validates)
    if len(ranks) == 1:
        return [work(ranks[0], f"{planned.layout.dims}")]
    with open_pool(len(ranks)) as pool:
        return pool.starmap(work, zip(ranks, titles, strict=True), chunksize=1)
