"""Compare two runs: every logged figure, and every tensor of the checkpoints that both have.

Losses can agree where optimizer states differ, hence the tensors.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, field
from pathlib import Path

from torchtitan.base.errors import DataError, printable
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.checksums import read_manifest
from torchtitan.checkpoint.storage import find_steps
from torchtitan.metrics.rows import RECORD, read_rows
from torchtitan.tools.compare.gaps import compare_rows, compare_tensors
from torchtitan.tools.tensors import StoredTensors
from torchtitan.tools.verbs import format_table

TIMING = ("tokens_per_second", "tflops", "mfu", "_time_s", "memory_peak", "slowest_")
"""Parts of the names of figures that depend on speed and hardware."""
OF_RANKS = ("rank_", "world_size")
"""State of single ranks, which differs between layouts."""
MAX_LOSS = "max_loss"
"""The largest mean loss of a data-parallel rank, whose samples differ between layouts."""


@dataclass
class Comparison:
    """The differences between two runs."""

    differences: list[str] = field(default_factory=list)
    """Of figures by step, then of checkpoints by step and name."""
    table: list[tuple[str, int, int, float]] = field(default_factory=list)
    """(part, number of tensors or figures, number that differ, largest difference)"""

    def add_rows(self, a: Path, b: Path, *, tolerance: float) -> None:
        """Compare the figures of every step; raise DataError if a folder is no run."""
        rows = []
        for run in (a, b):
            if not (run / f"{RECORD}.jsonl").is_file():
                raise DataError(f"each RUN must be a run's folder with {RECORD}.jsonl, got {run}")
            rows.append([*read_rows(run / f"{RECORD}.jsonl")])
        skip = (*TIMING, *OF_RANKS, MAX_LOSS) if tolerance else TIMING
        figures = {(row["step"], name) for row in [*rows[0], *rows[1]] for name in row}
        names = sorted({name for _, name in figures} - {"step"})
        kept = [name for name in names if not any(part in name for part in skip)]
        gaps = compare_rows(*rows, tolerances=dict.fromkeys(kept, tolerance))
        self.differences += [str(gap) for gap in gaps.values() if gap.beyond]
        num_figures = sum(name in kept for _, name in figures)
        num_beyond = sum(len(gap.beyond) for gap in gaps.values())
        largest = max((gap.largest for gap in gaps.values()), default=0.0)
        self.table.append((f"{RECORD}.jsonl", num_figures, num_beyond, largest))

    def add_checkpoints(self, a: Path, b: Path, *, tolerance: float) -> None:
        """Compare two checkpoints, component by component."""
        components = [{*read_manifest(checkpoint)["components"]} for checkpoint in (a, b)]
        skip = OF_RANKS if tolerance else ()
        for component in sorted(components[0] | components[1]):
            part = f"{a.name}/{component}"
            if component not in components[0] & components[1]:
                side = "A" if component in components[0] else "B"
                self.differences.append(f"{part}: only in {side}")
                continue
            if any((c / component / storage.STATE).is_file() for c in (a, b)):
                x, y = (storage.read_state(c, component) for c in (a, b))
                for key in sorted(x.keys() | y.keys()):
                    if x.get(key) != y.get(key) and not (skip and key.startswith(skip)):
                        self.differences.append(f"{part}, {key}: {x.get(key)!r} and {y.get(key)!r}")
            tensors = [StoredTensors(c, component, skip=skip) for c in (a, b)]
            if names := {*tensors[0], *tensors[1]}:
                gaps = [*compare_tensors(*tensors, tolerance=tolerance)]
                self.differences += [f"{part}, {name}: {text}" for name, _, text in gaps]
                largest = max((gap for _, gap, _ in gaps), default=0.0)
                self.table.append((part, len(names), len(gaps), largest))


def compare_runs(a: Path, b: Path, *, folder: str, tolerance: float) -> Comparison:
    """Compare the figures and checkpoints of two runs.

    `folder` is their `checkpoint.folder`; a relative difference of `tolerance` counts as equal.
    Raises UserError if one of them is no run, or they have nothing to compare.
    """
    comparison = Comparison()
    comparison.add_rows(a, b, tolerance=tolerance)
    steps = {*find_steps(a / folder)} & {*find_steps(b / folder)}
    for step in sorted(steps):
        checkpoints = [run / folder / f"step-{step}" for run in (a, b)]
        comparison.add_checkpoints(*checkpoints, tolerance=tolerance)
    if not any(number for _, number, _, _ in comparison.table):
        raise DataError(
            f"two runs must have rows or checkpoints to compare, {a} and {b} have neither; train "
            f"them, or set --folder to their checkpoint.folder"
        )
    return comparison


def main(options: argparse.Namespace) -> int:
    """Compare two runs, print the result and return the exit code."""
    a, b, tolerance = options.a, options.b, options.tolerance
    comparison = compare_runs(a, b, folder=options.folder, tolerance=tolerance)
    rows = [["", "compared", "differ", "by at most"]]
    for part, num, differ, gap in comparison.table:
        is_other = differ and not gap  # a layout of data, not a number
        rows.append([part, str(num), str(differ), "-" if is_other else f"{gap:.3g}"])
    say("\n".join(format_table(rows)))
    if len(comparison.table) == 1:
        say("only figures were compared: no step has a checkpoint in both runs")
    if comparison.differences:
        say(f"different; first: {comparison.differences[0]}")
        return 1
    equal = "equal" + (f" within {tolerance:g}" if tolerance else ", bit for bit")
    say(equal if len(comparison.table) > 1 else f"figures {equal}")
    return 0


def say(text: str) -> None:
    """Print a result at once."""
    sys.stdout.write(printable(text) + "\n")
    sys.stdout.flush()
