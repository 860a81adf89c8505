"""The command `layout`: the best degrees for a number of ranks, and the job's file for them.

Formulas rank all layouts (`candidates.py`). The best are rehearsed, as by `memory` and `step`, and
those that fit are sorted by their rehearsed time. All figures that are shown come from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.log import plural
from torchtitan.config.settings import to_toml
from torchtitan.tools.plan.account import replay
from torchtitan.tools.plan.allocator import GIB
from torchtitan.tools.plan.candidates import RECOMPUTES, Candidate, measure, rank_candidates
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.ranks import open_pool, rehearse_rank
from torchtitan.tools.plan.step import StepTime, time_step

SHOWN, REHEARSED, MOST = 3, 4, 16
"""Number of layouts to show, the number rehearsed at a time until one fits, and the most."""
SLOW = 1.3
"""Layouts that take this many times as long as the fastest are not shown."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A rehearsed layout that fits."""

    candidate: Candidate
    memory: int
    """Bytes that the fullest rank needs."""
    time: StepTime

    @property
    def seconds(self) -> float:
        """The middle of the bounds, as by the formulas."""
        return (self.time.best + self.time.worst) / 2

    def __str__(self) -> str:
        time = self.time
        return (
            f"{self.memory / GIB:>6.1f}{f'{time.best:.3g}-{time.worst:.3g}':>18}"
            f"{f'{time.mfu[0]:.0f}-{time.mfu[1]:.0f}':>10}  {time.binds:<11}{self.candidate}\n"
        )


def plan_layout(planned: Planned, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a table of the best layouts, the fastest first; raise ConfigError if none fits."""
    device, training = planned.device, planned.config.training
    samples = arguments.global_batch or planned.layout.samples_per_step(training)
    yield (
        f"{planned.config.model.name} {planned.config.model.flavor} on {planned.world_size} x "
        f"{device.name} ({device.memory / GIB:.1f} GiB), {planned.gpus_per_node} on a machine; "
        f"{samples} samples of {training.seq_len} tokens in a step\n"
    )
    write: Path | None = arguments.write
    if write is not None and write.exists():
        raise ConfigError(f"--write must name a new file, got {write}")
    rows: list[Row] = []
    with open_pool(REHEARSED) as pool:
        costs = pool.map(partial(measure, planned), RECOMPUTES, chunksize=1)
        sys.stderr.write("ranking all layouts by formulas\n")
        ranked = rank_candidates(
            planned, samples=samples, measured=dict(zip(RECOMPUTES, costs, strict=True))
        )
        yield f"{plural(len(ranked), 'layout')} fit by the formulas\n"
        for start in range(0, min(MOST, len(ranked)), REHEARSED):
            candidates = ranked[start : start + REHEARSED]
            tried = pool.map(partial(_rehearse, planned), candidates, chunksize=1)
            rows = [row for row in tried if row is not None]
            if rows:
                break
    if not rows:
        raise ConfigError(
            f"no layout of {planned.world_size} x {device.name} with {samples} samples per step "
            "fits; use more ranks, another --global_batch, shorter sequences or a device with more "
            "memory"
        )
    rows.sort(key=lambda row: row.seconds)
    yield (
        "rehearsed, the fastest that fit:\n\n"
        f"{'GiB':>6}{'step, s':>18}{'MFU, %':>10}  {'binds':<11}layout\n"
    )
    yield "".join(str(row) for row in rows[:SHOWN] if row.seconds <= SLOW * rows[0].seconds)
    yield "\nTimes are bounds; the limits of `plan memory` and `plan step` apply.\n"
    if write is not None:
        config = rows[0].candidate.apply(planned.config)
        write.parent.mkdir(parents=True, exist_ok=True)
        write.write_text(to_toml(config, only_changed=True), encoding="utf-8")
        yield f"\nwrote the fastest of them to {write}\n"


def _rehearse(planned: Planned, candidate: Candidate) -> Row | None:
    """Return the memory and time of a layout, or None if the rules forbid it or it does not fit."""
    try:
        job = candidate.place(planned)
    except ConfigError:
        return None
    ranks, pipeline = job.first_ranks(), job.layout.pipeline
    if pipeline is not None and pipeline.splits_backward:
        ranks.reverse()  # the last rank waits longest with gradients of weights
    records, memory = [], 0
    for rank in ranks:
        title = str(candidate) if len(ranks) == 1 else f"{candidate}, rank {rank}"
        records.append(rehearse_rank(job, rank, title=title))
        memory = max(memory, replay(records[-1]).needed)
        if memory > planned.device.memory:
            return None
    return Row(candidate=candidate, memory=memory, time=time_step(job, records))
