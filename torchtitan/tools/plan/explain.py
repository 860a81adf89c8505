"""The command `explain`: the measurements of a run beside its plan.

The job is planned from the settings, ranks and device that the run recorded. The first row after a
start is skipped, because it includes the start-up. A measured peak has no kinds; those shown are
planned. Figures of a CPU are not compared: its memory is that of the process, and the planner has
no peaks for it.
"""

from __future__ import annotations

import argparse
import re
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from statistics import median

from torchtitan.base.custom import trusting_stored
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.job import CONFIG_FILE
from torchtitan.metrics.events import Hardware, read_hardware
from torchtitan.metrics.rows import Row, figure_of, read_rows
from torchtitan.resume_rules import Job
from torchtitan.tools.plan.account import Account, replay
from torchtitan.tools.plan.allocator import GIB
from torchtitan.tools.plan.devices import DEVICES, Device, device_named, find_device
from torchtitan.tools.plan.job import Planned, place
from torchtitan.tools.plan.records import rehearse_ranks
from torchtitan.tools.plan.step import StepTime, time_step

CPU = "(OMP_NUM_THREADS)"
"""Part of a CPU's name in `base/device.py`."""
NEEDED = ("memory_peak_gib", "step_time_s", "data_time_s")
SPEED = {"step_time_s": "step, s", "tokens_per_second": "tokens/s", "mfu": "MFU, %"}
RANK_FILE = re.compile(r"metrics\.rank_([0-9]{1,9})\.jsonl")


def explain(arguments: argparse.Namespace) -> str:
    """Return the comparison as text."""
    with trusting_stored(arguments.trust_code):
        return _explain(arguments)


def _explain(arguments: argparse.Namespace) -> str:
    run: Path = arguments.run
    config = Job.stored_in(run / CONFIG_FILE).config
    start = read_hardware(run)
    measured = read_columns(settled(read_rows(run / "metrics.jsonl"), start=start))
    peaks = {0: max(measured["memory_peak_gib"]), **_peaks_of_others(run, start=start)}
    device = device_of(start.device, asked=arguments.device)
    on_cpu = CPU in start.device
    is_same = device is not None and device is device_named(start.device)
    planned = place(
        config,
        world_size=start.world_size,
        device=device or replace(DEVICES["H100"], name=start.device),  # peaks are not shown
        gpus_per_node=start.ranks_per_machine,
    )
    records = rehearse_ranks(planned)
    accounts = [replay(record) for record in records]
    parts = [
        planned.headline(),
        f"measured on {start.world_size} x {start.device}, {len(measured['step'])} rows after the "
        f"first of the start at step {start.resumed_from}",
        _memory(peaks, planned, accounts, comparable=not on_cpu),
    ]
    step_time = None if device is None else time_step(planned, records)
    parts.append(_speed(measured, step_time, comparable=is_same))
    if not is_same:
        parts.append(
            f"Not compared: step time, tokens/s and MFU, because the plan has no peaks of "
            f"{start.device}"
            + ("; memory, because on a CPU it is that of the process." if on_cpu else ".")
            + ("" if device else " --device plans for another device.")
        )
    return "\n\n".join(parts) + "\n"


def settled(rows: Iterable[Row], *, start: Hardware) -> Iterator[Row]:
    """Yield the rows of the newest start without the first, which includes the start-up; raise
    ConfigError if no row is left."""
    resumed = islice((row for row in rows if row["step"] > start.resumed_from), 1, None)
    first = next(resumed, None)
    if first is None:
        raise ConfigError(
            "metrics.jsonl must have two rows since the newest start, because the first includes "
            "the start-up; train more steps, or lower metrics.log_freq"
        )
    yield first
    yield from resumed


def read_columns(rows: Iterable[Row]) -> dict[str, array[float]]:
    """Return the finite values of each figure shown, in 8 bytes each; a row takes 1 KiB; raise
    DataError if a row lacks one of NEEDED, or a figure is not a number."""
    columns = {name: array("d") for name in ("step", *NEEDED, *SPEED)}
    for row in rows:
        for name, column in columns.items():
            value = figure_of(row, name)
            if value is not None:
                column.append(value)
            elif name in NEEDED:
                raise DataError(f"step {row['step']} lacks {name!r}")
    return columns


def device_of(recorded: str, *, asked: str | None) -> Device | None:
    """Return the device that `asked` names, else the recorded one, or None for a CPU."""
    if asked is not None:
        return find_device(asked, memory_gib=None)
    if (device := device_named(recorded)) is not None or CPU in recorded:
        return device
    raise ConfigError(
        f"the run's device must be one of {', '.join(DEVICES)}, got {recorded!r}; set --device to "
        "the nearest"
    )


def _peaks_of_others(run: Path, *, start: Hardware) -> dict[int, float]:
    """Return the peak in GiB of each rank but 0 that has written its figures."""
    files = {int(m[1]): path for path in run.iterdir() if (m := RANK_FILE.fullmatch(path.name))}
    return {
        rank: max(row["memory_peak_gib"] for row in settled(read_rows(path), start=start))
        for rank, path in sorted(files.items())
        if rank < start.world_size
    }


def _memory(
    peaks: Mapping[int, float], planned: Planned, accounts: Sequence[Account], *, comparable: bool
) -> str:
    """Return the measured peaks, and those predicted for the ranks' stages."""
    of_stage = dict(zip(planned.pipeline_ranks, accounts, strict=True))
    ranks_per_stage = planned.world_size // planned.layout.dims.pp
    lines = [f"{'memory, GiB':<25}{'measured':>10}{'predicted':>11}{'reserved':>10}"]
    for rank, measured in peaks.items():
        line = f"{f'rank {rank}, peak':<25}{measured:>10.5f}"
        account = of_stage.get(rank // ranks_per_stage)
        if account is not None:
            active = account.active / GIB
            line += f"{active:>11.5f}{account.reserved / GIB:>10.5f}"
            if comparable:
                line += f"  measured is {100 * (measured / active - 1):+.1f} % off"
        lines.append(line)
    stages = {rank // ranks_per_stage for rank in peaks} & set(of_stage)
    for stage in sorted(stages):
        of = f" of pipeline rank {stage}" if len(of_stage) > 1 else ""
        lines.append(f"predicted peak{of}, by kind")
        by_kind = of_stage[stage].by_kind
        lines += [f"  {content:<33}{size / GIB:>11.5f}" for content, size in by_kind.items()]
    return "\n".join(lines)


def _speed(
    measured: Mapping[str, Sequence[float]], step_time: StepTime | None, *, comparable: bool
) -> str:
    lines = [f"{'':<12}{'measured':>12}{'lowest':>12}{'highest':>12}   predicted"]
    bounds: Mapping[str, tuple[float, float]] = (
        {}
        if step_time is None
        else {
            "step_time_s": (step_time.best, step_time.worst),
            "tokens_per_second": step_time.tokens_per_second,
            "mfu": step_time.mfu,
        }
    )
    for key, name in SPEED.items():
        values = measured[key]
        line = f"{name:<12}"
        figures = (median(values), min(values), max(values)) if values else ()
        line += "".join(f"{n:>12.4g}" for n in figures) if values else f"{'none':>12}{'':24}"
        if key in bounds:
            line += f"   {bounds[key][0]:.4g} to {bounds[key][1]:.4g}"
        lines.append(line)
    if step_time is not None and comparable:
        lines.append(_verdict(measured, best=step_time.best, worst=step_time.worst))
    return "\n".join(lines)


def _verdict(measured: Mapping[str, Sequence[float]], *, best: float, worst: float) -> str:
    """Describe where the measured time of a step is between the bounds."""
    step, data = (median(measured[key]) for key in ("step_time_s", "data_time_s"))
    if step < best:
        return f"faster than the best bound by {100 * (1 - step / best):.0f} %"
    if step <= worst:
        return "within the bounds"
    return (
        f"slower than the worst bound by {100 * (step / worst - 1):.0f} %: waiting for data took "
        f"{data:.4g} s of a step, {100 * data / (step - worst):.0f} % of the excess. Checkpoints "
        "and validation are not included, so the rest is in kernels, links or the host: profile a "
        "step (docs/metrics.md)"
    )
