"""Two ways to do the same, timed in turns.

A B A B, so that a disk that grows slow or a busy neighbour meets both. The first pair, which also
takes the memory that later ones have, is not counted.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch


@dataclass(frozen=True)
class Comparison:
    """Seconds of two ways to do the same, pair by pair."""

    name: str
    target: str
    ours_s: list[float]
    other_s: list[float]

    @property
    def ratios(self) -> list[float]:
        """Ours over the other, of each pair; of times."""
        return [ours / other for ours, other in zip(self.ours_s, self.other_s, strict=True)]


def alternate(
    name: str, target: str, ours: Callable[[], float], other: Callable[[], float], *, num_pairs: int
) -> Comparison:
    """Compare two ways, each of which returns its seconds."""
    ours(), other()  # the first of each finds no memory and no files
    pairs = [(ours(), other()) for _ in range(num_pairs)]
    return Comparison(name, target, [a for a, _ in pairs], [b for _, b in pairs])


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that an action takes."""
    start = time.perf_counter()
    action()
    return time.perf_counter() - start


def report(comparisons: Sequence[Comparison], *, title: str) -> None:
    """Print medians, and the ratio of times with its spread over the pairs."""
    print(f"{title}, medians of {len(comparisons[0].ours_s)} pairs")
    print(f"{'':25}{'ours':>10}{'other':>10}{'ratio':>8}   {'spread':14}target")
    for each in comparisons:
        ours, other = statistics.median(each.ours_s), statistics.median(each.other_s)
        spread = f"{min(each.ratios):.2f} to {max(each.ratios):.2f}"
        ratio = statistics.median(each.ratios)
        line = f"{each.name:25}{ours:8.3f} s{other:8.3f} s{ratio:8.2f}   {spread:14}{each.target}"
        print(line)


def write(
    path: Path | None, comparisons: Sequence[Comparison], *, about: Mapping[str, object]
) -> None:
    """Write the figures as JSON, where a path is given."""
    if path is not None:
        rows = [asdict(each) | {"ratios": each.ratios} for each in comparisons]
        figures = {**about, "torch": torch.__version__, "comparisons": rows}
        path.write_text(json.dumps(figures, indent=1), encoding="utf-8")
