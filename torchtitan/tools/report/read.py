"""Read a run's folder: its figures, events, settings and hardware."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from torchtitan.base.errors import ConfigError, DataError, UserError
from torchtitan.base.log import plural
from torchtitan.job import CONFIG_FILE
from torchtitan.layout import find_layout
from torchtitan.metrics.ledger import Hardware, newest_hardware, read_ledger
from torchtitan.metrics.rows import RECORD, Row, figure_of, read_rows
from torchtitan.parallel.layout import Layout
from torchtitan.resume_rules import Job, resolve_model

PANELS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("loss", "nats per token", ("loss", "validation_loss")),
    ("gradient norm, before clipping", "L2 norm", ("grad_norm",)),
    ("learning rate", "learning rate", ("lr",)),
    ("throughput of all devices", "tokens / s", ("tokens_per_second",)),
    ("time of a step, and of waiting for data", "seconds", ("step_time_s", "data_time_s")),
    ("peak memory", "GiB", ("memory_peak_gib",)),
    ("time of the slowest rank", "ratio to the other ranks", ("slowest_ratio",)),
    ("model FLOPs utilization", "% of the peak", ("mfu",)),
    ("load of the busiest expert", "ratio to the mean", ("router/load_max_over_mean",)),
)
"""Title, label of the y axis, and figures of each chart."""
NUM_BUCKETS = 2000


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run."""

    name: str
    folder: Path
    rows: list[Row]
    ledger: list[Row]
    job: Job | None
    """None: this version cannot read the settings."""
    hardware: Hardware | None
    layout: Layout | None
    """None: unknown settings or hardware, or a custom model that is not trusted."""


def read_run(folder: Path, *, name: str) -> RunRecord:
    """Read a run.

    Raises:
        DataError: It has no logged step, or a file is damaged.
    """
    path = folder / f"{RECORD}.jsonl"
    rows = list(read_rows(path)) if path.exists() else []
    if not rows:
        raise DataError(
            f"each RUN must be the job.dump_folder of a run with a logged step in {RECORD}.jsonl, "
            f"got {folder}"
        )
    try:
        job = Job.stored_in(folder / CONFIG_FILE)
    except ConfigError:
        job = None
    ledger = read_ledger(folder)
    hardware = newest_hardware(ledger)
    layout = None
    if job is not None and hardware is not None:
        # errors: another layout of an elastic start, or a file that was moved
        with suppress(UserError):
            layout = find_layout(resolve_model(job.config), world_size=hardware.world_size)
    return RunRecord(
        name=name,
        folder=folder,
        rows=rows,
        ledger=ledger,
        job=job,
        hardware=hardware,
        layout=layout,
    )


def name_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the shortest end of its path that is unique."""
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return {str(Path(*path.parts[-length:])): path for path in paths}


def curve(rows: Sequence[Row], name: str) -> tuple[list[int], list[float]]:
    """Return the ascending steps and finite values of a figure, thinned."""
    found = {row["step"]: value for row in rows if (value := figure_of(row, name)) is not None}
    return thinned(sorted(found.items()), num_buckets=NUM_BUCKETS)


def thinned(
    points: Sequence[tuple[int, float]], *, num_buckets: int
) -> tuple[list[int], list[float]]:
    """Return steps and values of the ends, and of the extremes in each of `num_buckets` parts.

    A screen shows no more points, and no spike is lost.
    """
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
    """Return the events of a run: step, time, kind and a line of text each."""
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
                f"{'skipped' if row['action'] == 'skip' else 'clipped'}"
            )
        elif kind == "end":
            line = f"ended: {row['reason']}"
        else:
            continue  # e.g. checkpoints, which are many
        found.append({"step": row["step"], "time": row["time"], "kind": kind, "line": line})
    return found


def _number(row: Row, name: str) -> str:
    value = figure_of(row, name)
    return str(row[name]) if value is None else f"{value:.4g}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
