"""The command `layout`: which degrees to take on so many ranks, and the job's file for them.

All layouts that could be tried are ranked by formulas (`candidates.py`); the best are rehearsed as
`memory` and `step` do, each in a process of its own, until enough of them fit. What is shown, and
written, comes from the rehearsal alone.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from multiprocessing.pool import Pool
from pathlib import Path

from torchtitan.base.device import GIB
from torchtitan.base.errors import ConfigError
from torchtitan.config.toml_files import to_toml
from torchtitan.plan.account import replay
from torchtitan.plan.candidates import (
    RECOMPUTES,
    Candidate,
    Measured,
    Recompute,
    measure,
    rank_candidates,
)
from torchtitan.plan.job import Planned, Sent, send
from torchtitan.plan.memory import needed
from torchtitan.plan.records import rehearse_rank
from torchtitan.plan.step import StepTime, time_step

SHOWN, TRIED = 3, 12
"""Layouts to find, and the most that are rehearsed for it."""


@dataclass(frozen=True, kw_only=True)
class Rehearsed:
    """A layout, and what its rehearsal tells."""

    candidate: Candidate
    memory: int
    """Bytes that the fullest rank needs."""
    time: StepTime


def plan_layout(planned: Planned, arguments: argparse.Namespace) -> str:
    """Return the best layouts as a table, and write the best one's job if a file is asked for."""
    samples = arguments.global_batch or planned.layout.samples_per_step(planned.config.training)
    with (
        tempfile.TemporaryDirectory() as folder,
        multiprocessing.get_context("spawn").Pool(os.cpu_count()) as pool,
    ):
        job = send(planned.config, planned, file=Path(folder) / "job.toml")
        figures = pool.map(_measure, [(job, recompute) for recompute in RECOMPUTES])
        measured = dict(zip(RECOMPUTES, figures, strict=True))
        ranked = rank_candidates(planned, samples=samples, measured=measured)
        if not ranked:
            raise ConfigError(
                f"no layout of {planned.world_size} x {planned.device.name} with {samples} samples "
                "in a step fits by the formulas; take more ranks, another --global_batch, or "
                "shorter sequences"
            )
        found = _find_fitting(planned, ranked, pool=pool, folder=Path(folder))
        pool.terminate()
    if not found:
        raise ConfigError(
            f"of the {min(TRIED, len(ranked))} layouts that seemed best none fits "
            f"{planned.device.name}; take more ranks, or a device with more memory"
        )
    text = _table(planned, found, samples=samples, num_ranked=len(ranked))
    if arguments.write is not None:
        config = found[0].candidate.apply(planned.config)
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(to_toml(config, only_changed=True), encoding="utf-8")
        text += f"\nwritten, with the first of them: {arguments.write}\n"
    return text


def _find_fitting(
    planned: Planned, ranked: Sequence[Candidate], *, pool: Pool, folder: Path
) -> list[Rehearsed]:
    """Rehearse the best layouts until enough of them fit."""
    found: list[Rehearsed] = []
    work = [
        (send(candidate.apply(planned.config), planned, file=folder / f"{n}.toml"), candidate)
        for n, candidate in enumerate(ranked[:TRIED])
    ]
    for number, rehearsed in enumerate(pool.imap(_rehearse, work), start=1):
        if rehearsed is not None and rehearsed.memory <= planned.device.memory:
            found.append(rehearsed)
        if sys.stderr.isatty():
            sys.stderr.write(f"\rrehearsed {number} layouts, {len(found)} fit")
        if len(found) == SHOWN:
            break
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    return found


def _measure(work: tuple[Sent, Recompute]) -> Measured:
    job, recompute = work
    return measure(job.place(), recompute)


def _rehearse(work: tuple[Sent, Candidate]) -> Rehearsed | None:
    """Rehearse both ends of a layout's pipeline; None: the rules do not allow it."""
    job, candidate = work
    try:
        planned = job.place()
    except ConfigError:
        return None
    pp = candidate.dims.pp
    planned = replace(planned, pipeline_ranks=[0, pp - 1] if pp > 1 else [0])
    records = [rehearse_rank(planned, rank) for rank in planned.first_ranks()]
    memory = max(needed(replay(record, expandable=True)) for record in records)
    return Rehearsed(candidate=candidate, memory=memory, time=time_step(planned, records))


def _table(planned: Planned, found: Sequence[Rehearsed], *, samples: int, num_ranked: int) -> str:
    device, training = planned.device, planned.config.training
    lines = [
        f"{planned.config.model.name} {planned.config.model.flavor} on {planned.world_size} x "
        f"{device.name} ({device.memory / GIB:.1f} GiB), {planned.gpus_per_node} on a machine; "
        f"{samples} samples of {training.seq_len} tokens in a step",
        f"{num_ranked} layouts fit by the formulas; rehearsed, the best that fit:",
        "",
        f"{'GiB':>6}{'step, s':>14}{'MFU, %':>10}  {'binds':<11}layout",
    ]
    lines += [
        f"{one.memory / GIB:>6.1f}{f'{one.time.best:.3g}-{one.time.worst:.3g}':>14}"
        f"{f'{one.time.mfu[0]:.0f}-{one.time.mfu[1]:.0f}':>10}  {one.time.binds:<11}"
        f"{one.candidate}"
        for one in found
    ]
    lines += ["", "Bounds, and limits as of `memory` and `step`."]
    return "\n".join(lines) + "\n"
