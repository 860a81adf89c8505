"""The verdict on each layout, and the tables that show them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from torchtitan.metrics.rows import Row
from torchtitan.tools.compare.compare_runs import say
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
    "any tensor in the first steps, final weights of any tensor relative to its movement."
)


@dataclass(kw_only=True)
class Verdict:
    """The comparison of a layout with the reference."""

    layout: str
    world_size: int
    seconds: float
    is_reference: bool = False
    routing: str = ""
    """replayed or free, for a model with experts."""
    problem: str = ""
    """Why the layout failed."""
    unequal: str = ""
    """The first initial weight that is not bit-identical."""
    steps: Divergence | None = None
    gradients: list[TensorGap] = field(default_factory=list)
    """One for each of the first steps."""
    gradients_tolerance: float = GRADIENTS_TOLERANCE
    weights: TensorGap | None = None
    weights_tolerance: float = WEIGHTS_TOLERANCE
    flips: Flips | None = None
    rows: list[Row] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The layout with its routing."""
        return f"{self.layout} ({self.routing})" if self.routing else self.layout

    @property
    def complaints(self) -> list[str]:
        """All differences beyond the tolerances; empty for the same training."""
        found = [self.problem, f"initial weights: {self.unequal}" if self.unequal else ""]
        found.append(self.flips.complaint if self.flips is not None else "")
        if (beyond := self._first_gradient) is not None:
            step, gap = beyond
            found.append(
                f"gradients from step {step}, the largest of {gap.name}: {gap.largest:.2g} "
                f"(tolerance {self.gradients_tolerance:g})"
            )
        if self.steps is not None and self.steps.is_found:
            found.append(str(self.steps))
        if self.weights is not None and self.weights.largest > self.weights_tolerance:
            found.append(
                f"final weights, the largest of {self.weights.name}: {self.weights.largest:.2g} "
                f"of its movement (tolerance {self.weights_tolerance:g})"
            )
        return [each for each in found if each]

    @property
    def _first_gradient(self) -> tuple[int, TensorGap] | None:
        steps = enumerate(self.gradients, start=1)
        return next((x for x in steps if x[1].largest > self.gradients_tolerance), None)

    @property
    def summary(self) -> str:
        """The verdict in a few words."""
        if self.problem:
            return "FAILED"
        if self.is_reference:
            return "reference"
        if self.unequal:
            return "DIVERGES at the initial weights"
        first = self.steps.first if self.steps is not None else None
        gradient = self._first_gradient
        # within a step, figures such as the loss come before the gradients
        if gradient is not None and (first is None or gradient[0] < first.beyond[0][0]):
            step, gap = gradient
            return f"DIVERGES at step {step}: gradient of {gap.name} by {gap.largest:.2g}"
        if first is not None:
            step, size = first.beyond[0]
            return f"DIVERGES at step {step}: {first.figure} by {size:.2g}"
        if self.complaints:
            return "DIVERGES, see below"
        flip = self.routing == "free" and self.flips is not None and self.flips.first_step
        return f"same up to a near tie in step {flip}" if flip else "same"


def show_table(verdicts: Sequence[Verdict]) -> None:
    """Print a line for each layout, then the complaints."""
    width = max(len("layout"), *(len(each.name) for each in verdicts))
    columns = (7, 9, 10, 11, 11, 10)
    heads = ("ranks", "seconds", "loss", "grad_norm", "gradients", "weights")
    rows = [("layout", heads, "verdict")]
    for each in verdicts:
        cells = ["-"] * 4
        if each.steps is not None:
            cells[:2] = (f"{each.steps.gaps[key].largest:.1e}" for key in ("loss", "grad_norm"))
        if each.gradients:
            cells[2] = f"{max(gap.largest for gap in each.gradients):.1e}"
        if each.weights is not None:
            cells[3] = f"{each.weights.largest:.1e}"
        facts = (str(each.world_size), f"{each.seconds:.0f}")
        rows.append((each.name, (*facts, *cells), each.summary))  # type: ignore[arg-type]
    for name, texts, verdict in rows:
        shown = "".join(f"{text:>{n}}" for text, n in zip(texts, columns, strict=True))
        say(f"{name:<{width}}{shown}  {verdict}")
    say(EXPLANATION)
    for each in verdicts:
        if each.flips is not None:
            say(f"{each.name}: {each.flips}")
    for each in verdicts:
        for complaint in each.complaints:
            say(f"{each.name}: {complaint}")


def show_steps(name: str, rows: Sequence[Row], *, reference_rows: Sequence[Row]) -> None:
    """Print loss and gradient norm of every step, with the difference from the reference."""
    reference = {int(row["step"]): row for row in reference_rows}
    say(f"{name}\n{'step':>6}{'loss':>18}{'relative':>10}{'grad_norm':>18}{'relative':>10}")
    for row in rows:
        cells = f"{row['step']:>6}"
        for figure in ("loss", "grad_norm"):
            gap = relative(reference.get(row["step"], {}).get(figure, math.nan), row[figure])
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
