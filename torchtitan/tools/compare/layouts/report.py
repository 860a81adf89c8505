"""The verdict on each layout, and the table that shows them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchtitan.metrics.rows import Row
from torchtitan.tools.compare.compare_runs import say
from torchtitan.tools.compare.layouts.flips import Flips
from torchtitan.tools.compare.layouts.gaps import (
    GRADIENTS_TOLERANCE,
    WEIGHTS_TOLERANCE,
    Gap,
    TensorGap,
    beyond_tolerance,
)
from torchtitan.tools.verbs import format_table

EXPLANATION = (
    "Largest relative differences: loss and grad_norm (before clipping) of any step, gradient of "
    "any tensor in the first steps, final weights of any tensor relative to its movement."
)


@dataclass(kw_only=True)
class Verdict:
    """The comparison of a layout with the reference."""

    layout: str
    world_size: int
    folder: Path
    """The run's folder."""
    seconds: float
    is_reference: bool = False
    problem: str = ""
    """Why the layout failed."""
    unequal: str = ""
    """The first initial weight that is not bit-identical."""
    steps: dict[str, Gap] = field(default_factory=dict)
    gradients: list[TensorGap] = field(default_factory=list)
    """One for each of the first steps."""
    gradients_tolerance: float = GRADIENTS_TOLERANCE
    weights: TensorGap | None = None
    weights_tolerance: float = WEIGHTS_TOLERANCE
    flips: Flips | None = None
    rows: list[Row] = field(default_factory=list)

    def differences(self) -> list[tuple[int, str]]:
        """Return the differences beyond the tolerances, each with its first step, in order."""
        differences = [(0, f"initial weights: {self.unequal}")] if self.unequal else []
        differences += [(gap.beyond[0][0], str(gap)) for gap in beyond_tolerance(self.steps)]
        for step, gap in enumerate(self.gradients, start=1):
            if gap.largest > self.gradients_tolerance:
                text = (
                    f"gradients from step {step}, the largest of {gap.name}: {gap.largest:.2g} "
                    f"(tolerance {self.gradients_tolerance:g})"
                )
                differences.append((step, text))
                break
        if self.flips is not None and self.flips.complaint:
            differences.append((self.flips.first_step or 1, self.flips.complaint))
        if self.weights is not None and self.weights.largest > self.weights_tolerance:
            text = (
                f"final weights, the largest of {self.weights.name}: {self.weights.largest:.2g} "
                f"of its movement (tolerance {self.weights_tolerance:g})"
            )
            differences.append((max(int(row["step"]) for row in self.rows), text))
        return sorted(
            differences, key=lambda difference: difference[0]
        )  # within a step, figures come first

    @property
    def complaints(self) -> list[str]:
        """Why the layout failed or diverges; empty for the same training."""
        return [self.problem] if self.problem else [text for _, text in self.differences()]

    @property
    def summary(self) -> str:
        """The verdict in a few words."""
        if self.problem:
            return "FAILED"
        if self.is_reference:
            return "reference"
        if self.unequal:
            return "DIVERGES at the initial weights"
        differences = self.differences()
        return f"DIVERGES at step {differences[0][0]}" if differences else "same"


def show_table(verdicts: Sequence[Verdict]) -> None:
    """Print a line for each layout, then the complaints."""
    rows = [["layout", "ranks", "seconds", "loss", "grad_norm", "gradients", "weights"]]
    for verdict in verdicts:
        figures = [
            verdict.steps[key].largest if verdict.steps else None for key in ("loss", "grad_norm")
        ]
        figures.append(max((gap.largest for gap in verdict.gradients), default=None))
        figures.append(None if verdict.weights is None else verdict.weights.largest)
        cells = ["-" if figure is None else f"{figure:.1e}" for figure in figures]
        rows.append([verdict.layout, str(verdict.world_size), f"{verdict.seconds:.0f}", *cells])
    summaries = ["verdict", *(verdict.summary for verdict in verdicts)]
    for line, summary in zip(format_table(rows), summaries, strict=True):
        say(f"{line}  {summary}")
    say(EXPLANATION)
    for verdict in verdicts:
        if verdict.flips is not None:
            say(f"{verdict.layout}: {verdict.flips}")
        for complaint in verdict.complaints:
            say(f"{verdict.layout}: {complaint}")


def write_json(path: Path, verdicts: Sequence[Verdict], *, toml: Path) -> None:
    """Write every figure of every verdict."""
    runs = [
        {**asdict(verdict), "verdict": verdict.summary, "why": verdict.complaints}
        for verdict in verdicts
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(
        json.dumps({"toml": toml, "runs": runs}, indent=1, default=str), encoding="utf-8"
    )
