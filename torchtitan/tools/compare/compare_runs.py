"""Compare two runs: every logged figure, and every tensor of the checkpoints that both have.

    python -m torchtitan compare runs outputs/a outputs/b

Prints the first difference and a table; exit code 0 equal, 1 different, 2 a mistake. Equal means
bit for bit, unless --tolerance allows a relative difference: two layouts add in another order, and
their random generators, one a rank, are then left out. So is max_loss, the largest mean loss of a
data-parallel rank, where these ranks had other samples: it is comparable between layouts with as
many of them and the same local batch, or with one each, as single, tp2, pp2 and cp2. Losses can
agree where an optimizer's state does not; hence the tensors. They are read one at a time, without a
process group, so that two runs of any size and layout fit into a laptop's memory.
"""

from __future__ import annotations

import argparse
import math
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.base.errors import DataError, UserError, printable
from torchtitan.base.log import plural
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.load import read_tensors
from torchtitan.checkpoint.reader import read_metadata
from torchtitan.checkpoint.storage import METADATA, find_steps
from torchtitan.mesh.dims import resolve_dims
from torchtitan.metrics.ledger import LEDGER, read_ledger
from torchtitan.metrics.rows import Row, read_rows
from torchtitan.resume_rules import Job

# figures of a row that no two runs share: how fast it went, and on what
TIMING = ("tokens_per_second", "tflops", "mfu", "_time_s", "memory_peak", "slowest_")
# what belongs to the ranks, which another layout has others of
OF_RANKS = ("rank_", "world_size")
MAX_LOSS = "max_loss"
PROG = "python -m torchtitan compare runs"
AT_ONCE = 2**26
"""Bytes that are read in one go."""


HasMaxLoss = Callable[[int], bool]
"""Tells whether the max_loss of a step is comparable."""


@dataclass
class Comparison:
    """What was found so far; differences in the order of steps and names."""

    tolerance: float = 0.0
    differences: list[str] = field(default_factory=list)
    table: list[tuple[str, int, int, float]] = field(default_factory=list)
    """(part, tensors or figures, how many of them differ, largest difference)"""
    steps_without_max_loss: list[int] = field(default_factory=list)
    """Steps whose max_loss was left out."""

    def compare_rows(
        self, a: Sequence[Row], b: Sequence[Row], *, has_max_loss: HasMaxLoss = lambda step: True
    ) -> None:
        """Compare the figures of every step; the later of two rows of one step counts.

        `has_max_loss` tells whether the max_loss of a step is comparable if there is a tolerance.
        """
        rows_a, rows_b = ({int(row["step"]): row for row in rows} for rows in (a, b))
        num_differing, largest, num_figures = 0, 0.0, 0
        for step in sorted(rows_a.keys() | rows_b.keys()):
            if step not in rows_a or step not in rows_b:
                self.differences.append(f"step {step}: only in {'A' if step in rows_a else 'B'}")
                num_differing += 1
                continue
            row_a, row_b = (_exact(rows[step], self.tolerance) for rows in (rows_a, rows_b))
            if self.tolerance and not has_max_loss(step):
                self.steps_without_max_loss.append(step)
                row_a, row_b = ({k: row[k] for k in row if k != MAX_LOSS} for row in (row_a, row_b))
            num_figures += len(row_a.keys() | row_b.keys())
            for key in {**row_a, **row_b}:
                gap, text = _gap(row_a.get(key), row_b.get(key), tolerance=self.tolerance)
                if text:
                    self.differences.append(f"step {step}, {key}: {text}")
                    num_differing, largest = num_differing + 1, max(largest, gap)
        self.table.append(("metrics.jsonl", num_figures, num_differing, largest))

    def compare_tensors(self, part: str, a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
        """Compare tensors by name; the mappings may read each one as it is asked for."""
        num_differing, largest = 0, 0.0
        names = sorted(set(a) | set(b))
        for name in names:
            if name not in a or name not in b:
                size, text = 0.0, f"only in {'A' if name in a else 'B'}"
            else:
                size, text = tensor_difference(a[name], b[name], tolerance=self.tolerance)
            if text:
                self.differences.append(f"{part}, {name}: {text}")
                num_differing, largest = num_differing + 1, max(largest, size)
        self.table.append((part, len(names), num_differing, largest))

    def compare_states(self, part: str, a: Mapping[str, Any], b: Mapping[str, Any]) -> None:
        """Compare what a component holds beside its tensors."""
        for key in sorted(a.keys() | b.keys()):
            if a.get(key) != b.get(key) and not (self.tolerance and key.startswith(OF_RANKS)):
                self.differences.append(f"{part}, {key}: {a.get(key)!r} and {b.get(key)!r}")


def _exact(row: Row, tolerance: float) -> Row:
    left_out = (*TIMING, *(OF_RANKS if tolerance else ()))
    return {key: value for key, value in row.items() if not any(part in key for part in left_out)}


def _gap(x: float | None, y: float | None, *, tolerance: float) -> tuple[float, str]:
    """Compare two figures, None where a row has none."""
    if x == y:
        return 0.0, ""
    if x is None or y is None:
        return 0.0, f"only in {'B' if x is None else 'A'}"
    if math.isnan(x) and math.isnan(y):
        return 0.0, ""
    gap = abs(x - y)
    if gap <= tolerance * max(abs(x), abs(y)):
        return 0.0, ""
    return gap, f"{x!r} and {y!r}, by {gap!r}"


def tensor_difference(a: Tensor, b: Tensor, *, tolerance: float) -> tuple[float, str]:
    """Return the largest difference and what to say of it; "" where the tensors are equal.

    `tolerance` is relative to the largest element: sums in another order lose digits of that one.
    """
    if a.shape != b.shape or a.dtype != b.dtype:
        return 0.0, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    flat_a, flat_b = (t.contiguous().reshape(-1) for t in (a, b))
    if torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8)):
        return 0.0, ""
    wide_a, wide_b = flat_a.double(), flat_b.double()
    gap = (wide_a - wide_b).abs()
    same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    gap[same] = 0.0
    allowed = tolerance * max(wide_a.abs().max().item(), wide_b.abs().max().item())
    outside = ~same & ~(gap <= allowed)
    if not outside.any():
        return (0.0, "") if tolerance else (0.0, "equal numbers, other bits (-0.0 or nan)")
    first = int(outside.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
    size = float(gap.nan_to_num(nan=float("inf")).max())
    return size, (
        f"{int(outside.sum())} of {a.numel()} elements, first {index}: {flat_a[first].item()!r} "
        f"and {flat_b[first].item()!r}; at most by {size:.3g}"
    )


class StoredTensors(Mapping[str, Tensor]):
    """The tensors of one component of a checkpoint, read when they are asked for in their order."""

    def __init__(self, checkpoint: Path, component: str, *, skip: tuple[str, ...]) -> None:
        self._checkpoint, self._component = checkpoint, component
        folder = checkpoint / component
        self._metadata: dict[str, Any] = {}
        if (folder / METADATA).is_file():
            stored = read_metadata(folder).state_dict_metadata
            self._metadata = {k: v for k, v in stored.items() if not k.startswith(skip)}
        self._read: dict[str, Tensor] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._read:
            self._read = {}
            self._read = self._read_on_from(name)
        return self._read[name]

    def _read_on_from(self, name: str) -> dict[str, Tensor]:
        """Read a tensor, and with it those behind it that fit in: each reading costs by itself."""
        tensors: dict[str, Tensor] = {}
        size = 0
        for each in sorted(other for other in self._metadata if other >= name):
            about = self._metadata[each]
            size += about.size.numel() * about.properties.dtype.itemsize
            if tensors and size > AT_ONCE:
                break
            tensors[each] = torch.empty(about.size, dtype=about.properties.dtype)
        read_tensors(self._checkpoint, self._component, into=tensors, group=None)
        return tensors

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(self._metadata))

    def __len__(self) -> int:
        return len(self._metadata)


def find_max_loss(a: Path, b: Path) -> HasMaxLoss:
    """Return in which steps the data-parallel ranks of two runs had the same samples.

    The ledgers tell the layout of each start. Without a ledger nothing is known.

    Raises:
        UserError: A ledger is damaged.
    """
    splits: list[list[tuple[int, tuple[int, int]]]] = []
    for run in (a, b):
        splits.append([])
        for row in read_ledger(run):
            if row["event"] == "start":
                config = Job.stored(row["config"], file=run / LEDGER).config
                dp = resolve_dims(config.parallelism, world_size=row["world_size"]).dp
                # one rank has all samples, whatever its microbatches are
                block = config.training.local_batch_size if dp > 1 else 0
                splits[-1].append((row["step"], (dp, block)))

    def is_same(step: int) -> bool:
        now = [next((s for first, s in reversed(x) if first < step), None) for x in splits]
        return now[0] is not None and now[0] == now[1]

    return is_same


def compare_checkpoints(found: Comparison, a: Path, b: Path, *, states: bool = True) -> None:
    """Compare two checkpoints, component by component; without `states` their tensors alone."""
    parts_a, parts_b = (storage.read_manifest(c)["components"] for c in (a, b))
    skip = OF_RANKS if found.tolerance else ()
    for component in sorted(set(parts_a) | set(parts_b)):
        part = f"{a.name}/{component}"
        if component not in parts_a or component not in parts_b:
            found.differences.append(f"{part}: only in {'A' if component in parts_a else 'B'}")
            continue
        if states and any((c / component / storage.STATE).is_file() for c in (a, b)):
            held = [storage.read_state(c, component) for c in (a, b)]
            found.compare_states(part, *held)
        tensors = [StoredTensors(c, component, skip=skip) for c in (a, b)]
        if tensors[0] or tensors[1]:
            found.compare_tensors(part, *tensors)


def compare_runs(a: Path, b: Path, *, folder: str, tolerance: float) -> Comparison:
    """Compare all that two runs' folders have in common.

    Raises:
        UserError: One of them is no run, or they share nothing to compare.
    """
    found = Comparison(tolerance)
    rows = []
    for run in (a, b):
        if not (run / "metrics.jsonl").is_file():
            raise DataError(f"each RUN must be a run's folder with a metrics.jsonl, got {run}")
        rows.append(read_rows(run / "metrics.jsonl"))
    found.compare_rows(*rows, has_max_loss=find_max_loss(a, b) if tolerance else lambda step: True)
    steps = [find_steps(run / folder) for run in (a, b)]
    if not any(rows) and not set(steps[0]) & set(steps[1]):
        raise DataError(
            f"two runs must have rows or checkpoints to compare, {a} and {b} have neither; train "
            f"them, or give --folder where their checkpoints lie elsewhere"
        )
    for step in sorted(set(steps[0]) & set(steps[1])):
        compare_checkpoints(found, a / folder / f"step-{step}", b / folder / f"step-{step}")
    return found


def main(argv: Sequence[str], *, prog: str = PROG) -> int:
    """Compare, print what was found, and return the exit code."""
    parser = argparse.ArgumentParser(prog=prog, description=(__doc__ or "").splitlines()[0])
    parser.add_argument("a", type=Path, metavar="A", help="folder of a run")
    parser.add_argument("b", type=Path, metavar="B", help="folder of another")
    parser.add_argument("--folder", default="checkpoint", help="the runs' checkpoint.folder")
    parser.add_argument(
        "--tolerance", type=float, default=0.0, help="relative difference that counts as equal"
    )
    options = parser.parse_args(argv)
    # one process is what is meant here
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
    try:
        found = compare_runs(
            options.a, options.b, folder=options.folder, tolerance=options.tolerance
        )
    except UserError as error:
        sys.stderr.write(f"error: {error}\n")
        return error.exit_code
    say(f"{'':<28}{'compared':>10}{'differ':>10}{'by at most':>14}")
    for part, compared, differing, largest in found.table:
        say(f"{part:<28}{compared:>10}{differing:>10}{largest:>14.3g}")
    if found.steps_without_max_loss:
        count = plural(len(found.steps_without_max_loss), "step")
        say(f"max_loss of {count} is left out: the data-parallel ranks had other samples")
    if len(found.table) == 1:
        say("no step has a checkpoint in both: figures alone were compared")
    if found.differences:
        say(f"different; first: {found.differences[0]}")
        return 1
    say("equal" + (f" within {options.tolerance:g}" if options.tolerance else ", bit for bit"))
    return 0


def say(text: str) -> None:
    """Print a line of what was found."""
    sys.stdout.write(printable(text) + "\n")
