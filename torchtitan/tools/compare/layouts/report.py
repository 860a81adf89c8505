"""What is said of layouts that were compared: a verdict each, a table of them, every step."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchtitan.metrics.rows import Row
from torchtitan.tools.compare.layouts.flips import Flips
from torchtitan.tools.compare.layouts.gaps import (
    GRADIENTS_TOLERANCE,
    WEIGHTS_TOLERANCE,
    Divergence,
    TensorGap,
    relative,
)

EXPLANATION = (
    "Largest relative differences: loss and grad_norm (before clipping) of any step, gradient of "
    "any tensor in the first steps, final weights of any tensor against how far it moved."
)


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """How one layout compares with the reference, or that it is the reference."""

    layout: str
    world_size: int
    seconds: float
    is_reference: bool = False
    routing: str = ""
    """replayed or free, of a model with experts."""
    problem: str = ""
    """Why there is nothing to compare."""
    unequal: str = ""
    """The first initial weight that is not equal bit for bit."""
    steps: Divergence | None = None
    gradients: tuple[TensorGap, ...] = ()
    """Of the first steps, one after the other."""
    gradients_tolerance: float = GRADIENTS_TOLERANCE
    weights: TensorGap | None = None
    weights_tolerance: float = WEIGHTS_TOLERANCE
    flips: Flips | None = None
    """Where tokens were sent to other experts than in the reference."""
    rows: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The layout, and how its experts were chosen."""
        return f"{self.layout} ({self.routing})" if self.routing else self.layout

    @property
    def complaints(self) -> list[str]:
        """Say all that is wrong; empty where it is the same training."""
        found = [self.problem] if self.problem else []
        if self.unequal:
            found.append(f"initial weights: {self.unequal}")
        if self.flips is not None and self.flips.complaint:
            found.append(self.flips.complaint)
        if (apart := self._first_gradient) is not None:
            step, gap = apart
            found.append(
                f"gradients from step {step}, most of all {gap.name}, there by {gap.largest:.2g} "
                f"(tolerance {self.gradients_tolerance:g})"
            )
        if self.steps is not None and self.steps.is_found:
            found.append(str(self.steps))
        if self.weights is not None and self.weights.largest > self.weights_tolerance:
            found.append(
                f"final weights, most of all {self.weights.name}, by {self.weights.largest:.2g} of "
                f"how far it moved (tolerance {self.weights_tolerance:g})"
            )
        return found

    @property
    def _first_gradient(self) -> tuple[int, TensorGap] | None:
        apart = [
            (step, gap)
            for step, gap in enumerate(self.gradients, start=1)
            if gap.largest > self.gradients_tolerance
        ]
        return apart[0] if apart else None

    @property
    def summary(self) -> str:
        """Say it in a few words."""
        if self.problem:
            return "FAILED"
        if self.is_reference:
            return "reference"
        first = self.steps.first if self.steps is not None else None
        if self.unequal:
            return "DIVERGES at the initial weights"
        gradient = self._first_gradient
        # an unequal figure of the same step, as the loss, comes before it in the step
        if gradient is not None and (first is None or gradient[0] < first.beyond[0][0]):
            step, gap = gradient
            return f"DIVERGES at step {step}: gradient of {gap.name} by {gap.largest:.2g}"
        if first is not None:
            step, size = first.beyond[0]
            return f"DIVERGES at step {step}: {first.figure} by {size:.2g}"
        if self.complaints:
            return "DIVERGES, see below"
        parted = self.routing == "free" and self.flips is not None and self.flips.first_step
        return f"same up to a near tie in step {parted}" if parted else "same"


def say(text: str) -> None:
    """Say a result."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_table(verdicts: Sequence[Verdict]) -> None:
    """Print a line for each layout, and below what is wrong with it."""
    width = max(len("layout"), *(len(each.name) for each in verdicts))
    head = (
        f"{'ranks':>7}{'seconds':>9}{'loss':>10}{'grad_norm':>11}{'gradients':>11}{'weights':>10}"
    )
    say(f"{'layout':<{width}}{head}  verdict")
    for each in verdicts:
        loss = norm = gradients = weights = "-"
        if each.steps is not None:
            loss, norm = (f"{each.steps.gaps[key].largest:.1e}" for key in ("loss", "grad_norm"))
        if each.gradients:
            gradients = f"{max(gap.largest for gap in each.gradients):.1e}"
        if each.weights is not None:
            weights = f"{each.weights.largest:.1e}"
        figures = f"{loss:>10}{norm:>11}{gradients:>11}{weights:>10}"
        cells = f"{each.world_size:>7}{each.seconds:>9.0f}{figures}"
        say(f"{each.name:<{width}}{cells}  {each.summary}")
    say(EXPLANATION)
    for each in verdicts:
        if each.flips is not None:
            say(f"{each.name}: {each.flips}")
    for each in verdicts:
        for complaint in each.complaints:
            say(f"{each.name}: {complaint}")


def show_steps(name: str, rows: Sequence[Row], *, reference_rows: Sequence[Row]) -> None:
    """Print loss and gradient norm of every step, each with its difference from the reference."""
    theirs = {int(row["step"]): row for row in reference_rows}
    say(f"{name}\n{'step':>6}{'loss':>18}{'relative':>10}{'grad_norm':>18}{'relative':>10}")
    for row in rows:
        step = int(row["step"])
        cells = f"{step:>6}"
        for figure in ("loss", "grad_norm"):
            gap = relative(theirs.get(step, {}).get(figure, math.nan), row[figure])
            shown = "-" if row[figure] is None else f"{row[figure]:.10g}"
            cells += f"{shown:>18}{gap:>10.1e}"
        say(cells)


def write_json(path: Path, verdicts: Mapping[str, Sequence[Verdict]], *, toml: Path) -> None:
    """Write every figure of every verdict."""
    runs = [
        {"clipping": clipping, **asdict(each), "verdict": each.summary, "why": each.complaints}
        for clipping, group in verdicts.items()
        for each in group
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"toml": str(toml), "runs": runs}, indent=1), encoding="utf-8")
