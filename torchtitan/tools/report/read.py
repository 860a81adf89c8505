"""What a run's folder tells a reader: its figures, what was done to it, and where it ran."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.log import plural
from torchtitan.job import CONFIG_FILE
from torchtitan.metrics.ledger import Hardware, newest_hardware, read_ledger
from torchtitan.metrics.rows import RECORD, Row, figure_of, read_rows
from torchtitan.resume_rules import Job

PANELS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "loss": ("loss", ("loss", "validation_loss")),
    "grad_norm": ("gradient norm, before clipping", ("grad_norm",)),
    "lr": ("learning rate", ("lr",)),
    "tokens_per_second": ("tokens / s, all devices", ("tokens_per_second",)),
    "step_time_s": ("seconds of a step, and of waiting for data", ("step_time_s", "data_time_s")),
    "memory_peak_gib": ("peak memory, GiB", ("memory_peak_gib",)),
    "slowest_ratio": ("slowest rank, times the others", ("slowest_ratio",)),
    "mfu": ("model FLOP/s, % of the peak", ("mfu",)),
    "router/load_max_over_mean": (
        "load of the busiest expert, of the mean",
        ("router/load_max_over_mean",),
    ),
}
"""Figure of a row -> title, and what is drawn together."""
NUM_BUCKETS = 2000


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run."""

    name: str
    folder: Path
    rows: list[Row]
    ledger: list[Row]
    job: Job | None
    """None: its settings cannot be read by this version."""
    hardware: Hardware | None


def read_run(folder: Path, *, name: str) -> RunRecord:
    """Read a run; raise DataError if it has logged nothing."""
    path = folder / f"{RECORD}.jsonl"
    rows = read_rows(path) if path.exists() else []
    if not rows:
        raise DataError(
            f"each RUN must be a run's folder with rows in its {RECORD}.jsonl, got {folder}; name "
            f"the job.dump_folder of a run that has logged a step"
        )
    try:
        job = Job.stored_in(folder / CONFIG_FILE)
    except ConfigError:
        job = None
    ledger = read_ledger(folder)
    return RunRecord(
        name=name,
        folder=folder,
        rows=rows,
        ledger=ledger,
        job=job,
        hardware=newest_hardware(ledger),
    )


def name_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the end of its path: as much of it as tells the runs apart."""
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return {str(Path(*path.parts[-length:])): path for path in paths}


def curve(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return steps and finite values of a figure, thinned; other rows are left out."""
    found = ((row["step"], figure_of(row, name)) for row in rows)
    points = [(step, value) for step, value in found if value is not None]
    return thinned(points, num_buckets=NUM_BUCKETS)


def thinned(
    points: Sequence[tuple[int, float]], *, num_buckets: int
) -> tuple[list[int], list[float]]:
    """Keep of each of `num_buckets` parts the smallest and the largest value, in their order, and
    the ends: a screen shows no more, and no spike is lost."""
    if len(points) > 2 * num_buckets:
        kept = {0, len(points) - 1}
        for bucket in range(num_buckets):
            first = bucket * len(points) // num_buckets
            indices = range(first, (bucket + 1) * len(points) // num_buckets)
            kept.add(min(indices, key=lambda i: points[i][1]))
            kept.add(max(indices, key=lambda i: points[i][1]))
        points = [points[i] for i in sorted(kept)]
    return [step for step, _ in points], [value for _, value in points]


def events(run: RunRecord) -> list[dict[str, object]]:
    """Return what was done to a run: each row's step, time, kind and a line about it."""
    found: list[dict[str, object]] = []
    is_first = True
    for row in run.ledger:
        kind = row["event"]
        if kind == "start":
            verb = "started" if is_first else "started again"
            line = f"{verb}: {row['layout']}, {plural(row['world_size'], 'rank')}"
            is_first = False
        elif kind == "change":
            line = f"{row['setting']}: {_short(row['old'])} \u2192 {_short(row['new'])}"
        elif kind == "spike":
            line = (
                f"spike: {row['figure']} {_number(row, 'value')} above {_number(row, 'bound')}; "
                f"{'left out' if row['action'] == 'skip' else 'clipped'}"
            )
        elif kind == "end":
            line = f"ended: {row['reason']}"
        else:
            continue  # checkpoints are many, and no surprise
        found.append({"step": row["step"], "time": row["time"], "kind": kind, "line": line})
    return found


def _number(row: Row, name: str) -> str:
    value = figure_of(row, name)
    return str(row[name]) if value is None else f"{value:.4g}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
