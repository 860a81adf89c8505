"""The command `layout`: which degrees to take on so many ranks, and the job's file for them.

All layouts that could be tried are ranked by formulas (`candidates.py`); the best are rehearsed as
`memory` and `step` do, until enough of them fit. What is shown, and
written, comes from the rehearsal alone.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.pool import Pool
from pathlib import Path

from torchtitan.base.device import GIB
from torchtitan.base.errors import ConfigError
from torchtitan.config.sources import to_toml
from torchtitan.tools.plan.candidates import (
    RECOMPUTES,
    Candidate,
    Measured,
    Recompute,
    measure,
    rank_candidates,
)
from torchtitan.tools.plan.job import BUDGET_IS_NOT_TRIED, Planned, Sent, send
from torchtitan.tools.plan.records import open_pool
from torchtitan.tools.plan.tried import Tried, try_jobs

SHOWN, TRIED = 3, 12
"""Layouts to find, and the most that are rehearsed for it."""


def plan_layout(planned: Planned, arguments: argparse.Namespace) -> str:
    """Return the best layouts as a table, and write the best one's job if a file is asked for."""
    samples = arguments.global_batch or planned.layout.samples_per_step(planned.config.training)
    with (
        tempfile.TemporaryDirectory() as folder,
        open_pool(max(TRIED, len(RECOMPUTES))) as pool,
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
        config = found[0][0].apply(planned.config)
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(to_toml(config, only_changed=True), encoding="utf-8")
        text += f"\nwritten, with the first of them: {arguments.write}\n"
    return text


def _find_fitting(
    planned: Planned, ranked: Sequence[Candidate], *, pool: Pool, folder: Path
) -> list[tuple[Candidate, Tried]]:
    """Rehearse the best layouts until enough of them fit."""
    found: list[tuple[Candidate, Tried]] = []
    best = ranked[:TRIED]
    jobs = [
        send(candidate.apply(planned.config), planned, file=folder / f"{n}.toml")
        for n, candidate in enumerate(best)
    ]
    for candidate, tried in zip(best, try_jobs(jobs, pool=pool), strict=True):
        if tried is not None and tried.memory <= planned.device.memory:
            found.append((candidate, tried))
        if len(found) == SHOWN:
            break
    if sys.stderr.isatty():
        sys.stderr.write("\n")
    return found


def _measure(work: tuple[Sent, Recompute]) -> Measured:
    job, recompute = work
    return measure(job.place(), recompute)


def _table(
    planned: Planned, found: Sequence[tuple[Candidate, Tried]], *, samples: int, num_ranked: int
) -> str:
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
        f"{tried.memory / GIB:>6.1f}{f'{tried.time.best:.3g}-{tried.time.worst:.3g}':>14}"
        f"{f'{tried.time.mfu[0]:.0f}-{tried.time.mfu[1]:.0f}':>10}  {tried.time.binds:<11}"
        f"{candidate}"
        for candidate, tried in found
    ]
    lines += ["", "Bounds, and limits as of `memory` and `step`."]
    if planned.has_budget:
        lines.append(BUDGET_IS_NOT_TRIED)
    return "\n".join(lines) + "\n"
