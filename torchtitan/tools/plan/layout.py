"""The command `layout`: the best degrees for a number of ranks, and the job's file for them.

Formulas rank all layouts (`candidates.py`). The best are rehearsed, as by `memory` and `step`,
until enough of them fit. All figures that are shown come from the rehearsal.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from functools import partial
from multiprocessing.pool import Pool
from pathlib import Path

from torchtitan.base.errors import ConfigError
from torchtitan.base.log import plural
from torchtitan.config.sources import to_toml
from torchtitan.job import Config
from torchtitan.tools.plan.allocator import GIB
from torchtitan.tools.plan.candidates import (
    RECOMPUTES,
    Candidate,
    Measured,
    Recompute,
    measure,
    rank_candidates,
)
from torchtitan.tools.plan.job import Planned, Sent, send
from torchtitan.tools.plan.records import open_pool, run_in
from torchtitan.tools.plan.tried import Tried, try_job

SHOWN, TRIED = 3, 12
"""Number of fitting layouts to find, and the most that are rehearsed for it."""


def plan_layout(planned: Planned, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a table of the best layouts, each row as soon as it is found.

    The job of the fastest one is written to the file in `arguments.write`, if set. A signal ends
    the search; the fastest layout until then is still named.

    Raises:
        ConfigError: No layout fits.
    """
    samples = arguments.global_batch or planned.layout.samples_per_step(planned.config.training)
    device, training = planned.device, planned.config.training
    yield (
        f"{planned.config.model.name} {planned.config.model.flavor} on {planned.world_size} x "
        f"{device.name} ({device.memory / GIB:.1f} GiB), {planned.gpus_per_node} on a machine; "
        f"{samples} samples of {training.seq_len} tokens in a step\n"
    )
    found: list[tuple[Candidate, Tried]] = []
    with open_pool(TRIED) as pool:
        ranked = _rank(pool, planned, samples=samples)
        yield (
            f"{len(ranked)} layouts fit by the formulas; rehearsed, the best that fit:\n\n"
            f"{'GiB':>6}{'step, s':>14}{'MFU, %':>10}  {'binds':<11}layout\n"
        )
        best, stop = ranked[:TRIED], None
        jobs = [send(candidate.apply(planned.config), planned) for candidate in best]
        results = run_in(pool, try_job, jobs, names=[str(candidate) for candidate in best])
        try:
            for candidate, tried in zip(best, results, strict=True):
                if tried is None or tried.memory > device.memory:
                    continue
                yield _row(candidate, tried)
                found.append((candidate, tried))
                fastest = min(found, key=_seconds)[0]
                sys.stderr.write(f"fastest so far: {fastest}\n")
                if fastest is candidate and arguments.write is not None:
                    _write(candidate.apply(planned.config), arguments.write)
                if len(found) == SHOWN:
                    break
        except SystemExit as error:  # a signal
            if not found:
                raise
            stop = error
    if not found:
        raise ConfigError(
            f"the {plural(len(best), 'best layout')} do not fit {device.name}; use more ranks, "
            "or a device with more memory"
        )
    yield f"\nthe fastest of them: {fastest}\n"
    if arguments.write is not None:
        yield f"written, with the fastest of them: {arguments.write}\n"
    yield "\nBounds, and limits as of `memory` and `step`.\n"
    if stop is not None:
        raise stop


def _rank(pool: Pool, planned: Planned, *, samples: int) -> list[Candidate]:
    """Return the layouts that fit by the formulas, the fastest first.

    Raises:
        ConfigError: There is none.
    """
    work = partial(_measure, send(planned.config, planned))
    names = [f"recompute {recompute}, on one device" for recompute in RECOMPUTES]
    figures = run_in(pool, work, RECOMPUTES, names=names)
    measured = dict(zip(RECOMPUTES, figures, strict=True))
    sys.stderr.write("ranking all layouts by formulas\n")
    ranked = rank_candidates(planned, samples=samples, measured=measured)
    if not ranked:
        raise ConfigError(
            f"no layout of {planned.world_size} x {planned.device.name} with {samples} samples "
            "per step fits by the formulas; use more ranks, another --global_batch or shorter "
            "sequences"
        )
    return ranked


def _write(config: Config, file: Path) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(to_toml(config, only_changed=True), encoding="utf-8")


def _measure(job: Sent, recompute: Recompute) -> Measured:
    return measure(job.place(), recompute)


def _seconds(found: tuple[Candidate, Tried]) -> float:
    """Return the middle of the bounds, as the formulas do."""
    time = found[1].time
    return (time.best + time.worst) / 2


def _row(candidate: Candidate, tried: Tried) -> str:
    time = tried.time
    return (
        f"{tried.memory / GIB:>6.1f}{f'{time.best:.3g}-{time.worst:.3g}':>14}"
        f"{f'{time.mfu[0]:.0f}-{time.mfu[1]:.0f}':>10}  {time.binds:<11}{candidate}\n"
    )
