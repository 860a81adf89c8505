"""Read a run's folder: its figures, events, settings and hardware."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise, repeat
from math import nan
from pathlib import Path

import numpy as np
import numpy.typing as npt

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.log import plural
from torchtitan.config.settings import flatten, parse
from torchtitan.job import CONFIG_FILE, Config
from torchtitan.metrics.events import EVENTS, read_events
from torchtitan.metrics.rows import RECORD, Row, figure_of, read_rows
from torchtitan.resume_rules import Job

PANELS: Sequence[tuple[str, str, tuple[str, ...]]] = (
    ("loss", "nats per token", ("loss", "validation_loss")),
    ("gradient norm, before clipping", "L2 norm", ("grad_norm",)),
    ("learning rate", "learning rate", ("lr",)),
    ("throughput of all devices", "tokens / s", ("tokens_per_second",)),
    (
        "time of a step, and of waiting for data",
        "seconds",
        ("step_time_s", "data_time_s", "slowest_data_time_s"),
    ),
    ("peak memory", "GiB", ("memory_peak_gib",)),
    ("model FLOPs utilization", "% of the peak", ("mfu",)),
    ("load of the busiest expert", "ratio to the mean", ("router/load_max_over_mean",)),
)
"""Title, label of the y axis, and figures of each chart."""
NUM_BUCKETS = 2000
Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Figures:
    """Figures of a run's rows by column, in 8 bytes each; rows as dictionaries take 1 KiB each."""

    last: Row
    """The last row."""
    steps: npt.NDArray[np.int64]
    """Step of each row, in the order of the file."""
    values: dict[str, Floats]
    """Figures that a row has, by name; NaN in rows where they are missing or not finite."""

    def curve(self, name: str) -> tuple[list[int], list[float]]:
        """Return the ascending steps and finite values of a figure, thinned."""
        is_finite = np.isfinite(self.values.get(name, np.empty(0)))
        if not is_finite.any():
            return [], []
        values, newest_first = self.values[name][is_finite][::-1], self.steps[is_finite][::-1]
        steps, indices = np.unique(newest_first, return_index=True)  # of equal steps the newest
        return thinned(steps, values[indices], num_buckets=NUM_BUCKETS)

    def newest(self, name: str) -> float | None:
        """Return the last finite value of a figure."""
        values = self.values.get(name, np.empty(0))
        finite = values[np.isfinite(values)]
        return float(finite[-1]) if len(finite) else None


def read_figures(rows: Iterable[Row], names: Collection[str]) -> Figures | None:
    """Read the figures `names` of each row. Return None without rows. Raises DataError if a figure
    is not a number."""
    last, steps, columns = None, array("q"), dict[str, "array[float]"]()
    for last in rows:
        for name in names:
            if last.get(name) is not None:
                column, value = columns.setdefault(name, array("d")), figure_of(last, name)
                column.extend(repeat(nan, len(steps) - len(column)))  # rows before without it
                column.append(nan if value is None else value)
        steps.append(last["step"])
    if last is None:
        return None
    for column in columns.values():
        column.extend(repeat(nan, len(steps) - len(column)))
    values = {name: np.asarray(column) for name, column in columns.items()}
    return Figures(last, np.asarray(steps), values)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run."""

    name: str
    figures: Figures
    events: list[Row]
    config: Config | None
    """Newest settings. None: this version cannot read them."""


def read_run(folder: Path, *, name: str) -> RunRecord:
    """Read a run; raise DataError if it has no logged step, or a file is damaged."""
    path = folder / f"{RECORD}.jsonl"
    names = [name for _, _, names in PANELS for name in names]
    figures = read_figures(read_rows(path) if path.exists() else (), names)
    if figures is None:
        raise DataError(
            f"each RUN must be the job.dump_folder of a run with a logged step in {RECORD}.jsonl, "
            f"got {folder}"
        )
    config = None
    with suppress(ConfigError):
        config = Job.stored_in(folder / CONFIG_FILE).config
    return RunRecord(name=name, figures=figures, events=read_events(folder), config=config)


def name_runs(folders: Sequence[Path]) -> dict[str, Path]:
    """Name each run by the shortest end of its path that is unique."""
    paths = list(dict.fromkeys(folder.resolve() for folder in folders))
    length = 1
    while len({path.parts[-length:] for path in paths}) < len(paths):
        length += 1
    return {str(Path(*path.parts[-length:])): path for path in paths}


def thinned(
    steps: npt.NDArray[np.int64], values: Floats, *, num_buckets: int
) -> tuple[list[int], list[float]]:
    """Return steps and values of the ends, and of the extremes in each of `num_buckets` parts.

    A screen shows no more points, and no spike is lost.
    """
    if len(steps) > 2 * num_buckets:
        edges = [bucket * len(steps) // num_buckets for bucket in range(num_buckets + 1)]
        kept = {0, len(steps) - 1}
        for first, end in pairwise(edges):
            part = values[first:end]
            kept |= {first + int(part.argmin()), first + int(part.argmax())}
        positions = sorted(kept)
        steps, values = steps[positions], values[positions]
    return steps.tolist(), values.tolist()


def events(run: RunRecord) -> list[dict[str, object]]:
    """Return the events of a run: step, time, kind and a line of text each.

    A start lists the settings that changed since the start before it.
    """
    events_shown: list[dict[str, object]] = []
    settings: dict[str, object] | None = None
    for row in run.events:
        event_name, changes = row["event"], list[str]()
        if event_name == "start":
            now = _settings(row)
            line = f"{'started' if settings is None else 'started again'}: {row['layout']}"
            line += f", {plural(row['world_size'], 'rank')}"
            changes = [
                f"{key}: {_short(settings.get(key))} \u2192 {_short(now.get(key))}"
                for key in {**(settings or {}), **now}
                if settings is not None and settings.get(key) != now.get(key)
            ]
            settings = now
        elif event_name == "spike":
            line = (
                f"spike: {row['figure']} {_number(row, 'value')} above {_number(row, 'bound')}; "
                f"{'skipped' if row['action'] == 'skip' else 'clipped'}"
            )
        elif event_name in ("end", "failure"):
            line = f"ended: {row['reason']}"
        else:
            continue  # e.g. checkpoints, which are many
        facts = {"step": row["step"], "time": row["time"]}
        events_shown.append({**facts, "kind": event_name, "line": line})
        events_shown += ({**facts, "kind": "change", "line": change} for change in changes)
    return events_shown


def _settings(start: Row) -> dict[str, object]:
    flat = flatten(parse(start["config"], origin=EVENTS), origin=EVENTS)
    return {".".join(key): setting.value for key, setting in flat.items()}


def _number(row: Row, name: str) -> str:
    value = figure_of(row, name)
    return str(row[name]) if value is None else f"{value:.4g}"


def _short(value: object) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
