"""The command `layout`: the best degrees for a number of ranks, and the job's file for them.

Formulas rank all layouts (`formulas.py`). The best are rehearsed, as by `memory` and `step`, and
those that fit are sorted by their rehearsed time. All figures that are shown come from it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from multiprocessing.pool import Pool

from torchtitan.base.errors import ConfigError
from torchtitan.base.log import plural
from torchtitan.config.settings import to_toml
from torchtitan.tools.plan.allocator import GIB
from torchtitan.tools.plan.candidates import Candidate, Recompute
from torchtitan.tools.plan.formulas import Measured, between, measure, rank_candidates
from torchtitan.tools.plan.job import Planned, Sent, send
from torchtitan.tools.plan.pool import open_pool, run_in
from torchtitan.tools.plan.tried import Tried, try_job

SHOWN, TRIED, MOST = 3, 4, 16
"""Number of layouts to show, the number rehearsed at a time until one fits, and the most."""
SLOW = 1.3
"""Layouts that take this many times as long as the fastest are not shown."""
MEASURED: Sequence[Recompute] = ("none", "op", "full")
"""Ways of recomputation that are rehearsed on one device."""
SKIPPING: Sequence[Recompute] = ("2", "4")
"""Those that recompute every second or fourth block, between the first and the last."""


def plan_layout(planned: Planned, arguments: argparse.Namespace) -> Iterator[str]:
    """Yield a table of the best layouts, the fastest first.

    The job of the fastest one is written to the file in `arguments.write`, if set. A signal ends
    the search, and the table has the layouts rehearsed so far. Raises ConfigError if no layout
    fits.
    """
    samples = arguments.global_batch or planned.layout.samples_per_step(planned.config.training)
    device, training = planned.device, planned.config.training
    yield (
        f"{planned.config.model.name} {planned.config.model.flavor} on {planned.world_size} x "
        f"{device.name} ({device.memory / GIB:.1f} GiB), {planned.gpus_per_node} on a machine; "
        f"{samples} samples of {training.seq_len} tokens in a step\n"
    )
    with open_pool(TRIED) as pool:
        measured = _measure_all(planned, pool)
        sys.stderr.write("ranking all layouts by formulas\n")
        ranked = rank_candidates(planned, samples=samples, measured=measured)
        if not ranked:
            raise ConfigError(
                f"no layout of {planned.world_size} x {device.name} with {samples} samples per "
                "step fits by the formulas; use more ranks, another --global_batch or shorter "
                "sequences"
            )
        yield f"{len(ranked)} layouts fit by the formulas\n"
        candidates, stop = list[tuple[Candidate, Tried]](), None
        num = 0
        try:
            while not candidates and num < min(MOST, len(ranked)):
                tried = ranked[num : num + TRIED]
                num += len(tried)
                for candidate in _rehearse(planned, tried, pool):
                    candidates.append(candidate)
        except SystemExit as error:  # a signal
            if not candidates:
                raise
            stop = error
    if not candidates:
        raise ConfigError(
            f"the {plural(num, 'best layout')} do not fit {device.name}; use more ranks, or a "
            "device with more memory"
        )
    candidates.sort(key=_seconds)
    best = [
        candidate
        for candidate in candidates[:SHOWN]
        if _seconds(candidate) <= SLOW * _seconds(candidates[0])
    ]
    yield (
        "rehearsed, the fastest that fit:\n\n"
        f"{'GiB':>6}{'step, s':>14}{'MFU, %':>10}  {'binds':<11}layout\n"
    )
    yield "".join(_row(*candidate) for candidate in best)
    yield "\nTimes are bounds; the limits of `plan memory` and `plan step` apply.\n"
    if arguments.write is not None:
        config = candidates[0][0].apply(planned.config)
        arguments.write.parent.mkdir(parents=True, exist_ok=True)
        arguments.write.write_text(to_toml(config, only_changed=True), encoding="utf-8")
        yield f"\nwrote the fastest of them to {arguments.write}\n"
    if stop is not None:
        raise stop


def _measure_all(planned: Planned, pool: Pool) -> Mapping[Recompute, Measured]:
    """Return the cost of the model with each way of recomputation."""
    work = partial(_measure, send(planned.config, planned))
    names = [f"recompute {recompute}, on one device" for recompute in MEASURED]
    times = dict(zip(MEASURED, run_in(pool, work, MEASURED, names=names), strict=True))
    for setting in SKIPPING:
        times[setting] = between(times["none"], times["full"], share=1 / int(setting))
    return times


def _measure(job: Sent, recompute: Recompute) -> Measured:
    return measure(job.place(), recompute)


def _rehearse(
    planned: Planned, candidates: Sequence[Candidate], pool: Pool
) -> Iterator[tuple[Candidate, Tried]]:
    """Yield the candidates that fit, with their memory and time."""
    jobs = [send(candidate.apply(planned.config), planned) for candidate in candidates]
    work = partial(try_job, limit=planned.device.memory)
    results = run_in(pool, work, jobs, names=[str(candidate) for candidate in candidates])
    for candidate, tried in zip(candidates, results, strict=True):
        if tried is not None:
            yield candidate, tried


def _seconds(candidate: tuple[Candidate, Tried]) -> float:
    """Return the middle of the bounds, as the formulas do."""
    time = candidate[1].time
    return (time.best + time.worst) / 2


def _row(candidate: Candidate, tried: Tried) -> str:
    time = tried.time
    return (
        f"{tried.memory / GIB:>6.1f}{f'{time.best:.3g}-{time.worst:.3g}':>14}"
        f"{f'{time.mfu[0]:.0f}-{time.mfu[1]:.0f}':>10}  {time.binds:<11}{candidate}\n"
    )
