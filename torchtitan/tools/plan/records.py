"""The records of a job's pipeline ranks, rehearsed side by side."""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from multiprocessing.pool import Pool
from pathlib import Path

from torchtitan.data.prepare import num_cores
from torchtitan.tools.plan.job import Planned, Sent, send
from torchtitan.tools.plan.rehearse import rehearse_step
from torchtitan.tools.plan.tape import Piece, Record

MOST = 16
"""Processes at once, of about 0.4 GiB each."""


def open_pool(num_jobs: int) -> Pool:
    """Start processes to rehearse so many jobs: one process can pretend one world at a time."""
    num = max(1, min(num_jobs, num_cores(), MOST))
    return multiprocessing.get_context("spawn").Pool(num)


def rehearse_rank(planned: Planned, rank: int, *, validates: bool = True) -> Record:
    """Return the record of one rank of the job: of a step, and of the validation behind it, if the
    job has one and `validates`."""
    short = planned.shortened
    record = rehearse_step(short.config, layout=short.layout, rank=rank)
    if not (validates and planned.config.validation.enable):
        return record
    return follow(
        record, rehearse_step(short.config, layout=short.layout, rank=rank, validates=True)
    )


def rehearse_ranks(planned: Planned, *, validates: bool = True) -> list[Record]:
    """Return the record of the first rank of each pipeline rank, in their order.

    `validates`: with the validation, which takes memory and no time of a step.
    Ranks are rehearsed in processes of their own, as many at once as there are cores.
    """
    ranks = planned.first_ranks()
    if len(ranks) == 1:
        return [rehearse_rank(planned, ranks[0], validates=validates)]
    records = []
    with tempfile.TemporaryDirectory() as folder:
        job = send(planned.config, planned, file=Path(folder) / "job.toml")
        with open_pool(len(ranks)) as pool:
            for record in pool.imap(_rehearse, [(job, rank, validates) for rank in ranks]):
                records.append(record)
                if sys.stderr.isatty():
                    ending = "\n" if len(records) == len(ranks) else ""
                    said = f"\rrehearsed {len(records)} of {len(ranks)} pipeline ranks{ending}"
                    sys.stderr.write(said)
    return records


def follow(step: Record, validation: Record) -> Record:
    """Return the record of both in turn; they begin with the same state."""
    begun = next(p.start for p in validation.pieces[1:] if p.phase != "state")
    assert validation.entries[:begun] == step.entries[:begun]
    shift = len(step.entries) - begun
    entries = [
        entry._replace(born=entry.born + shift) if entry.born >= begun else entry
        for entry in validation.entries[begun:]
    ]
    pieces = [
        Piece(piece.start + shift, "validation", piece.block)
        for piece in validation.pieces[1:]
        if piece.phase != "state"
    ]
    return Record(step.entries + entries, step.pieces + pieces)


def _rehearse(work: tuple[Sent, int, bool]) -> Record:
    job, rank, validates = work
    return rehearse_rank(job.place(), rank, validates=validates)
