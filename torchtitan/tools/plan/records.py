"""Rehearse several ranks, or several jobs, in processes of their own.

One process can be a rank of one world at a time, so each rehearsal gets a process.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.pool import Pool
from typing import TypeVar

from torchtitan.data.prepare import num_cores
from torchtitan.tools.plan.job import Planned, Sent, send
from torchtitan.tools.plan.rehearse import rehearse_step
from torchtitan.tools.plan.tape import Piece, Record

MOST = 16
"""Largest number of processes. Each takes about 0.4 GiB."""
PATIENCE = 10
"""Seconds between two reports of progress."""
T = TypeVar("T")
U = TypeVar("U")


@contextmanager
def open_pool(num_jobs: int) -> Iterator[Pool]:
    """Start processes for a number of rehearsals, and end them with the context."""
    num = max(1, min(num_jobs, num_cores(), MOST))
    # this process handles Ctrl-C and ends its children
    ignored = (signal.SIGINT, signal.SIG_IGN)
    pool = multiprocessing.get_context("spawn").Pool(num, signal.signal, ignored)
    with pool:
        yield pool


def run_in(
    pool: Pool, work: Callable[[T], U], items: Sequence[T], *, names: Sequence[str]
) -> Iterator[U]:
    """Yield the result for each item in order, and report progress by the items' names, each as
    soon as it is done."""
    sys.stderr.write(f"rehearsing {len(items)}: {'; '.join(names)}\n")
    results = pool.imap_unordered(partial(_numbered, work), enumerate(items))
    start, done = time.monotonic(), dict[int, U]()
    for number, name in enumerate(names):
        while number not in done:
            try:
                other, result = results.next(timeout=PATIENCE)
            except multiprocessing.TimeoutError:
                elapsed = time.monotonic() - start
                sys.stderr.write(f"still rehearsing {name}, {elapsed:.0f} s\n")
                continue
            done[other] = result
            sys.stderr.write(f"rehearsed {len(done)} of {len(items)}: {names[other]}\n")
        yield done[number]


def _numbered(work: Callable[[T], U], item: tuple[int, T]) -> tuple[int, U]:
    return item[0], work(item[1])


def rehearse_rank(planned: Planned, rank: int, *, validates: bool = True) -> Record:
    """Return the record of a step of one rank and, with `validates`, of the job's validation."""
    config, layout = planned.shortened.config, planned.shortened.layout
    record = rehearse_step(config, layout=layout, rank=rank)
    if not (validates and planned.config.validation.enable):
        return record
    return follow(record, rehearse_step(config, layout=layout, rank=rank, validates=True))


def rehearse_ranks(planned: Planned, *, validates: bool = True) -> list[Record]:
    """Return the record of the first rank of each planned pipeline rank, in order.

    Args:
        validates: Add the validation, which takes memory but no time of a step.
    """
    ranks = planned.first_ranks()
    if len(ranks) == 1:
        return [rehearse_rank(planned, ranks[0], validates=validates)]
    work = partial(_rehearse, send(planned.config, planned), validates)
    with open_pool(len(ranks)) as pool:
        names = [f"pipeline rank {number}" for number in planned.pipeline_ranks]
        return list(run_in(pool, work, ranks, names=names))


def follow(step: Record, validation: Record) -> Record:
    """Return the record of a step and a validation. Both start with the same state."""
    start = next(p.start for p in validation.pieces[1:] if p.phase != "state")
    assert validation.entries[:start] == step.entries[:start]
    shift = len(step.entries) - start
    entries = [
        entry._replace(born=entry.born + shift) if entry.born >= start else entry
        for entry in validation.entries[start:]
    ]
    pieces = [
        Piece(piece.start + shift, "validation", piece.block)
        for piece in validation.pieces[1:]
        if piece.phase != "state"
    ]
    return Record(step.entries + entries, step.pieces + pieces)


def _rehearse(job: Sent, validates: bool, rank: int) -> Record:
    return rehearse_rank(job.place(), rank, validates=validates)
