"""Compare two runs: every logged figure, and every tensor of the checkpoints that both have.

Losses can agree where optimizer states differ, hence the tensors. They are read one at a time and
without a process group, so that runs of any size and layout fit into the memory of a laptop.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.base.errors import ConfigError, DataError, printable
from torchtitan.base.files import read_text
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import read_manifest
from torchtitan.checkpoint.reader import read_metadata, read_tensors
from torchtitan.checkpoint.storage import METADATA, find_steps
from torchtitan.config.settings import flatten, literal, parse
from torchtitan.job import CONFIG_FILE
from torchtitan.mesh.dims import resolve_dims
from torchtitan.metrics.events import EVENTS, read_events
from torchtitan.metrics.rows import Row, read_rows
from torchtitan.resume_rules import Job
from torchtitan.tools.compare.gaps import tensor_difference
from torchtitan.tools.verbs import format_table

TIMING = ("tokens_per_second", "tflops", "mfu", "_time_s", "memory_peak", "slowest_")
"""Parts of the names of figures that depend on speed and hardware."""
OF_RANKS = ("rank_", "world_size")
"""State of single ranks, which differs between layouts."""
MAX_LOSS = "max_loss"
DUMP_FOLDER = ("job", "dump_folder")
BYTES_AT_ONCE = 2**26


@dataclass
class Comparison:
    """The differences between two runs, in the order of steps and names."""

    tolerance: float = 0.0
    differences: list[str] = field(default_factory=list)
    table: list[tuple[str, int, int, float]] = field(default_factory=list)
    """(part, number of tensors or figures, number that differ, largest difference)"""

    def compare_rows(
        self, a: Sequence[Row], b: Sequence[Row], *, skipped: Sequence[str] = ()
    ) -> None:
        """Compare the figures of every step. If a step has two rows, the later one counts."""
        rows_a, rows_b = ({int(row["step"]): row for row in rows} for rows in (a, b))
        skip = (*TIMING, *skipped, *(OF_RANKS if self.tolerance else ()))
        num_figures, gaps = 0, []
        for step in sorted(rows_a.keys() | rows_b.keys()):
            if step not in rows_a or step not in rows_b:
                self.differences.append(f"step {step}: only in {'A' if step in rows_a else 'B'}")
                gaps.append(0.0)
                continue
            names = [
                name
                for name in {**rows_a[step], **rows_b[step]}
                if not any(part in name for part in skip)
            ]
            num_figures += len(names)
            for name in names:
                x, y = rows_a[step].get(name), rows_b[step].get(name)
                if not _is_equal(x, y, tolerance=self.tolerance):
                    gaps.append(0.0 if x is None or y is None else abs(x - y))
                    self.differences.append(f"step {step}, {name}: {_describe(x, y)}")
        self.table.append(("metrics.jsonl", num_figures, len(gaps), max(gaps, default=0.0)))

    def compare_tensors(self, part: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
        """Compare tensors by name. A mapping may read each tensor when it is looked up."""
        gaps, names = [], sorted({*a, *b})
        for name in names:
            gap, text = 0.0, f"only in {'A' if name in a else 'B'}"
            if name in a and name in b:
                gap, text = tensor_difference(a[name], b[name], tolerance=self.tolerance)
            if text:
                self.differences.append(f"{part}, {name}: {text}")
                gaps.append(gap)
        self.table.append((part, len(names), len(gaps), max(gaps, default=0.0)))

    def compare_states(self, part: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        """Compare the values of a component that are not tensors."""
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key) and not (self.tolerance and key.startswith(OF_RANKS)):
                self.differences.append(f"{part}, {key}: {a.get(key)!r} and {b.get(key)!r}")


def _is_equal(x: float | None, y: float | None, *, tolerance: float) -> bool:
    if x == y:
        return True
    if x is None or y is None:
        return False
    return (math.isnan(x) and math.isnan(y)) or abs(x - y) <= tolerance * max(abs(x), abs(y))


def _describe(x: float | None, y: float | None) -> str:
    if x is None or y is None:
        return f"only in {'B' if x is None else 'A'}"
    return f"{x!r} and {y!r}, by {abs(x - y)!r}"


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one component of a checkpoint, sorted by name and read on demand.

    Each read has a fixed cost, so tensors that follow are read ahead, up to `BYTES_AT_ONCE`.
    """

    def __init__(self, checkpoint: Path, component: str, *, skip: tuple[str, ...]) -> None:
        self._checkpoint, self._component = checkpoint, component
        folder = checkpoint / component
        self._metadata: dict[str, Any] = {}
        if (folder / METADATA).is_file():
            stored = read_metadata(folder)
            self._metadata = {k: v for k, v in stored.items() if not k.startswith(skip)}
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read = {}  # freed before the next tensors are allocated
            self._read = self._read_from(name)
        return self._read[name]

    def _read_from(self, name: str) -> dict[str, Tensor]:
        tensors: dict[str, Tensor] = {}
        size = 0
        for piece in sorted(stored_name for stored_name in self._metadata if stored_name >= name):
            entry = self._metadata[piece]
            size += math.prod(entry.shape) * entry.dtype.itemsize
            if tensors and size > BYTES_AT_ONCE:
                break
            tensors[piece] = torch.empty(entry.shape, dtype=entry.dtype)
        read_tensors(self._checkpoint, self._component, into=tensors, group=None)
        return tensors

    def __contains__(self, name: object) -> bool:
        return name in self._metadata

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._metadata))

    def __len__(self) -> int:
        return len(self._metadata)


def have_same_samples(a: Path, b: Path) -> bool:
    """Return whether the data-parallel ranks of two runs had the same samples, at every start.

    Then `max_loss`, the largest mean loss of such a rank, is comparable. Without events it is not.
    Raises UserError if the events are damaged.
    """
    splits: list[set[tuple[int, int]]] = [set(), set()]
    for run, split in zip((a, b), splits, strict=True):
        for row in read_events(run):
            if row["event"] == "start":
                config = Job.stored(row["config"], file=run / EVENTS).config
                dp = resolve_dims(config.parallelism, world_size=row["world_size"]).dp
                split.add(split_of(dp, config.training.local_batch_size))
    return splits[0] == splits[1] and len(splits[0]) == 1


def split_of(dp: int, local_batch_size: int) -> tuple[int, int]:
    """Return what decides the samples of a data-parallel rank. A single one has all samples, for
    any size of its microbatches."""
    return dp, local_batch_size if dp > 1 else 0


def compare_checkpoints(comparison: Comparison, a: Path, b: Path) -> None:
    """Compare two checkpoints, component by component."""
    parts_a, parts_b = (read_manifest(c)["components"] for c in (a, b))
    skip = OF_RANKS if comparison.tolerance else ()
    for component in sorted({*parts_a, *parts_b}):
        part = f"{a.name}/{component}"
        if component not in parts_a or component not in parts_b:
            comparison.differences.append(f"{part}: only in {'A' if component in parts_a else 'B'}")
            continue
        if any((c / component / storage.STATE).is_file() for c in (a, b)):
            comparison.compare_states(part, *(storage.read_state(c, component) for c in (a, b)))
        tensors = [StoredTensors(c, component, skip=skip) for c in (a, b)]
        if tensors[0] or tensors[1]:
            comparison.compare_tensors(part, *tensors)


def compare_runs(a: Path, b: Path, *, folder: str, tolerance: float) -> Comparison:
    """Compare the figures and checkpoints of two runs.

    `folder` is their `checkpoint.folder`; a relative difference of `tolerance` counts as equal.
    Raises UserError if one of them is no run, or they have nothing to compare.
    """
    comparison = Comparison(tolerance)
    rows = []
    for run in (a, b):
        if not (run / "metrics.jsonl").is_file():
            raise DataError(f"each RUN must be a run's folder with a metrics.jsonl, got {run}")
        rows.append(list(read_rows(run / "metrics.jsonl")))
    is_comparable = not tolerance or have_same_samples(a, b)
    comparison.compare_rows(*rows, skipped=() if is_comparable else (MAX_LOSS,))
    steps = [{*find_steps(run / folder)} for run in (a, b)]
    if not any(rows) and not steps[0] & steps[1]:
        raise DataError(
            f"two runs must have rows or checkpoints to compare, {a} and {b} have neither; train "
            f"them, or set --folder to their checkpoint.folder"
        )
    for step in sorted(steps[0] & steps[1]):
        compare_checkpoints(comparison, a / folder / f"step-{step}", b / folder / f"step-{step}")
    return comparison


def differing_settings(a: Path, b: Path) -> list[str]:
    """Return the settings of the newest starts that differ, with both values; raise ConfigError if
    a run's settings cannot be read."""
    files = [run / CONFIG_FILE for run in (a, b)]
    if not all(file.is_file() for file in files):
        return []
    x, y = (flatten(parse(read_text(f), origin=str(f)), origin=str(f)) for f in files)
    pairs = {
        path: tuple(literal(s[path].value) if path in s else "not set" for s in (x, y))
        for path in x | y
    }
    return [
        f"{'.'.join(path)}: {values[0]} and {values[1]}"
        for path, values in pairs.items()
        if values[0] != values[1] and path != DUMP_FOLDER
    ]


def main(options: argparse.Namespace) -> int:
    """Compare two runs, print the result and return the exit code."""
    tolerance = options.tolerance
    comparison = compare_runs(options.a, options.b, folder=options.folder, tolerance=tolerance)
    rows = [["", "compared", "differ", "by at most"]]
    for part, num, differ, gap in comparison.table:
        is_other = differ and not gap  # a layout of data, not a number
        rows.append([part, str(num), str(differ), "-" if is_other else f"{gap:.3g}"])
    for line in format_table(rows):
        say(line)
    if tolerance and not have_same_samples(options.a, options.b):
        say("max_loss is left out: the data-parallel ranks had different samples")
    if len(comparison.table) == 1:
        say("only figures were compared: no step has a checkpoint in both runs")
    try:
        if settings := differing_settings(options.a, options.b):
            say("\n  ".join(["settings that differ, in A and in B:", *settings]))
    except ConfigError as error:
        say(f"settings were not compared: {error}")
    if comparison.differences:
        say(f"different; first: {comparison.differences[0]}")
        return 1
    say("equal" + (f" within {tolerance:g}" if tolerance else ", bit for bit"))
    return 0


def say(text: str) -> None:
    """Print a result at once."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()
