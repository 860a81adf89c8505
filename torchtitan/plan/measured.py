"""The timeline of a pipeline that ran, from the traces of a profiled run.

Each rank's trace holds a range `pipeline:2F0` around every action, without the wait for what
another rank sends (`parallel/pipeline/ranges.py`). On a GPU such a range is the time of the launch,
not of the kernels, so traces of GPUs are refused.
Clocks of ranks on one machine are the same; across machines they are as equal as NTP keeps them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from torchtitan.base.errors import ConfigError
from torchtitan.base.files import read_text
from torchtitan.config.toml_files import parse
from torchtitan.parallel.pipeline.ranges import PREFIX
from torchtitan.parallel.pipeline.schedules import KINDS, Action, Kind
from torchtitan.plan.schedule import Costs, Span, Timeline

_RANGE = re.compile(PREFIX + r"(\d+)([FBIW])(\d+)")


@dataclass(frozen=True, kw_only=True)
class MeasuredRun:
    """What a run's folder tells of its pipeline."""

    schedule: str
    csv: str
    pp: int
    step: int
    timeline: Timeline
    """In milliseconds."""

    @property
    def num_stages(self) -> int:
        """Stages over all ranks."""
        return len({span.action.stage for row in self.timeline.rows for span in row})

    @property
    def num_microbatches(self) -> int:
        """Microbatches of one pass."""
        return len({span.action.microbatch for row in self.timeline.rows for span in row})

    def costs(self) -> Costs:
        """Return the mean duration of each kind, for a simulation in the same unit."""
        times: dict[Kind, list[float]] = {kind: [] for kind in KINDS.values()}
        for row in self.timeline.rows:
            for span in row:
                times[span.action.kind].append(span.end - span.start)
        return Costs(**{kind: mean(values) for kind, values in times.items() if values})


def read_run(run: Path, *, step: int | None) -> MeasuredRun:
    """Read the newest traced step of a run, or the one asked for.

    Raises:
        ConfigError: The folder holds no profiled run of a pipeline, or its traces are not whole.
    """
    settings = _settings(run)

    def value(section: str, key: str, default: Any) -> Any:
        table = settings.get(section, {})
        found = table.get(key, default) if isinstance(table, dict) else table
        if type(found) is not type(default):
            raise ConfigError(f"{run}: its {section}.{key} must be like {default!r}, got {found!r}")
        return found

    pp = value("parallelism", "pipeline_parallel_degree", 1)
    folder = value("profiling", "save_traces_folder", "profile_traces")
    folder = _find_step(run / folder, step=step)
    rows = _read_ranks(folder, pp=pp)
    begin = min(span.start for row in rows for span in row)
    shifted = [
        [Span(s.action, (s.start - begin) / 1e3, (s.end - begin) / 1e3) for s in row]
        for row in rows
    ]
    return MeasuredRun(
        schedule=value("parallelism", "pipeline_parallel_schedule", "1F1B"),
        csv=value("parallelism", "pipeline_parallel_schedule_csv", ""),
        pp=pp,
        step=int(folder.name.removeprefix("step-")),
        timeline=Timeline(rows=shifted),
    )


def _settings(run: Path) -> Mapping[str, Any]:
    path = run / "config.toml"
    try:
        text = read_text(path)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{run}: no run's folder, its config.toml cannot be read ({error}); give the "
            "job.dump_folder of a profiled run"
        ) from error
    return parse(text, origin=str(path))


def _find_step(folder: Path, *, step: int | None) -> Path:
    steps = sorted(
        int(path.name.removeprefix("step-"))
        for path in folder.glob("step-*")
        if path.name.removeprefix("step-").isdecimal()
    )
    if not steps:
        raise ConfigError(f"{folder}: holds no trace; train with --profiling.enable_profiling")
    if step is not None and step not in steps:
        raise ConfigError(
            f"{folder}: step {step} was not profiled, only {', '.join(map(str, steps))}"
        )
    return folder / f"step-{steps[-1] if step is None else step}"


def _read_ranks(folder: Path, *, pp: int) -> list[list[Span]]:
    """Return a row for each pipeline rank, the one that holds stage 0 first.

    Several ranks hold the same stages where data or tensor parallelism come on top. Ranks count
    along the pipeline last, so the first ones with their stages belong to one pipeline.
    """
    found = {path.stem.removeprefix("rank_"): path for path in folder.glob("rank_*.json")}
    files = [found[rank] for rank in sorted(filter(str.isdecimal, found), key=int)]
    if not 0 < pp <= len(files) or len(files) % pp:
        raise ConfigError(f"{folder}: holds {len(files)} traces, a multiple of {pp} ranks is due")
    return [read_trace(path) for path in files[:: len(files) // pp]]


def read_trace(path: Path) -> list[Span]:
    """Return the actions of the last pass in a rank's trace, in microseconds.

    Raises:
        ConfigError: The trace is damaged or holds no pipeline.
    """
    try:
        trace = json.loads(read_text(path))
        base = trace.get("baseTimeNanoseconds", 0) / 1e3
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        ranges = [event for event in events if event.get("cat") == "user_annotation"]
        spans = [span for event in ranges for span in _spans(event, base=base)]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as a trace ({error!r})") from error
    if any(event.get("cat") == "kernel" for event in events):
        raise ConfigError(
            f"{path}: is the trace of a GPU, whose kernels run after they are launched; draw it "
            "with https://ui.perfetto.dev"
        )
    last = _last_pass(sorted(spans, key=lambda span: span.start))
    if last:
        return last
    raise ConfigError(
        f"{path}: holds no action of a pipeline; was this run profiled with "
        "parallelism.pipeline_parallel_degree above 1?"
    )


def _spans(event: Mapping[str, Any], *, base: float) -> Iterator[Span]:
    if match := _RANGE.fullmatch(event["name"]):
        stage, letter, microbatch = match.groups()
        start = base + event["ts"]
        action = Action(int(stage), KINDS[letter], int(microbatch))
        yield Span(action, start, start + event["dur"])


def _last_pass(spans: Sequence[Span]) -> list[Span]:
    """Return the last pass with a backward: accumulation and validation make several."""
    passes: list[list[Span]] = [[]]
    seen: set[Action] = set()
    for span in spans:
        if span.action in seen:
            passes.append([])
            seen = set()
        seen.add(span.action)
        passes[-1].append(span)
    for one in reversed(passes):
        if any(span.action.kind != "forward" for span in one):
            return one
    return []
