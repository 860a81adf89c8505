"""Rehearse the ranks of a job, several of them in processes of their own."""

from __future__ import annotations

from functools import partial

from torchtitan.tools.plan.job import Planned, Sent, send
from torchtitan.tools.plan.pool import open_pool, run_in
from torchtitan.tools.plan.rehearse import rehearse_step
from torchtitan.tools.plan.tape import Piece, Record


def rehearse_rank(planned: Planned, rank: int, *, validates: bool = True) -> Record:
    """Return the record of a step of one rank and, with `validates`, of the job's validation."""
    config, layout = planned.shortened.config, planned.shortened.layout
    record = rehearse_step(config, layout=layout, rank=rank)
    if not (validates and planned.config.validation.enable):
        return record
    return follow(record, rehearse_step(config, layout=layout, rank=rank, validates=True))


def rehearse_ranks(planned: Planned, *, validates: bool = True) -> list[Record]:
    """Return the record of the first rank of each planned pipeline rank, in order.

    `validates` adds the validation, which takes memory but no time of a step.
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
