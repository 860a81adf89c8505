"""The command `layout`: which degrees to take on so many ranks, and the job's file for them.

All layouts that could be tried are ranked by formulas (`candidates.py`); the best are rehearsed as
`memory` and `step` do, each in a process of its own, until enough of them fit. What is shown, and
written, comes from the rehearsal alone.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count
from multiprocessing.pool import Pool
from pathlib import Path

from torchtitan.base.device import GIB
from torchtitan.base.errors import ConfigError
from torchtitan.config.toml_files import to_toml
from torchtitan.job import Config, load_config
from torchtitan.plan.account import replay
from torchtitan.plan.candidates import (
    RECOMPUTES,
    Candidate,
    Measured,
    Recompute,
    measure,
    rank_candidates,
)
from torchtitan.plan.devices import Device
from torchtitan.plan.job import Planned, place
from torchtitan.plan.memory import needed
from torchtitan.plan.rehearse import rehearse_step
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
        works = _Works(planned, folder=Path(folder))
        figures = pool.map(_measure, [works.of(planned.config, one) for one in RECOMPUTES])
        measured = dict(zip(RECOMPUTES, figures, strict=True))
        ranked = rank_candidates(planned, samples=samples, measured=measured)
        if not ranked:
            raise ConfigError(
                f"no layout of {planned.world_size} x {planned.device.name} with {samples} samples "
                "in a step fits by the formulas; take more ranks, another --global_batch, or "
                "shorter sequences"
            )
        found = _find_fitting(planned, ranked, pool=pool, works=works)
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
    planned: Planned, ranked: Sequence[Candidate], *, pool: Pool, works: _Works
) -> list[Rehearsed]:
    """Rehearse the best layouts until enough of them fit."""
    found: list[Rehearsed] = []
    work = [works.of(candidate.apply(planned.config), candidate) for candidate in ranked[:TRIED]]
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


@dataclass(frozen=True)
class _Work:
    """What another process is to look at: a job in a file, since settings cannot be sent."""

    file: str
    what: Candidate | Recompute
    world_size: int
    device: Device
    gpus_per_node: int

    def place(self, *, world_size: int) -> Planned:
        logging.disable(logging.WARNING)  # the command itself has said it
        return place(
            load_config([f"--job.config_file={self.file}"]),
            world_size=world_size,
            device=self.device,
            gpus_per_node=self.gpus_per_node,
            all_ranks=False,
        )


class _Works:
    """Writes jobs to files of a folder."""

    def __init__(self, planned: Planned, *, folder: Path) -> None:
        self._planned, self._folder = planned, folder
        self._numbers = count()

    def of(self, config: Config, what: Candidate | Recompute) -> _Work:
        """Return the work on a job."""
        file = self._folder / f"{next(self._numbers)}.toml"
        file.write_text(to_toml(config), encoding="utf-8")
        planned = self._planned
        return _Work(str(file), what, planned.world_size, planned.device, planned.gpus_per_node)


def _measure(work: _Work) -> Measured:
    assert not isinstance(work.what, Candidate)
    return measure(work.place(world_size=work.world_size), work.what)


def _rehearse(work: _Work) -> Rehearsed | None:
    """Rehearse both ends of a layout's pipeline; None: the rules do not allow it."""
    candidate = work.what
    assert isinstance(candidate, Candidate)
    try:
        planned = work.place(world_size=work.world_size)
    except ConfigError:
        return None
    pp = candidate.dims.pp
    planned = replace(planned, pipeline_ranks=[0, pp - 1] if pp > 1 else [0])
    short = planned.shortened
    records = [
        rehearse_step(short.config, layout=short.layout, rank=rank)
        for rank in planned.first_ranks()
    ]
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
