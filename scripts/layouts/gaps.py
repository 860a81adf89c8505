"""How far two trainings of the same job are apart: by figures of steps, and by weights.

All differences are relative, |a - b| / max(|a|, |b|): layouts add in another order, so that digits
differ, and in float32 about 1e-7 of a figure is one digit. What was read from the data, or computed
from the step alone, has no sum in it and must be equal: a difference there is no rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from scripts.compare_runs import tensor_difference
from torchtitan.metrics.sinks import Row

TOLERANCES: Mapping[str, float] = {
    "loss": 1e-5,
    "grad_norm": 1e-4,
    "lr": 0.0,
    "num_tokens": 0.0,
    "valid_token_fraction": 0.0,
}
"""Relative difference of each figure that rounding in float32 explains."""
WEIGHTS_TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Gap:
    """One figure of two runs, over all steps."""

    figure: str
    tolerance: float
    largest: float
    """Largest relative difference of any step."""
    beyond: tuple[tuple[int, float], ...]
    """Step and difference, wherever it is larger than the tolerance."""

    def __str__(self) -> str:
        if not self.beyond:
            return f"{self.figure} within {self.tolerance:g}, at most {self.largest:.2g}"
        step, size = self.beyond[0]
        return (
            f"{self.figure} from step {step}, there by {size:.2g} (tolerance {self.tolerance:g}), "
            f"at most by {self.largest:.2g}"
        )


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """How the steps of two runs differ."""

    gaps: Mapping[str, Gap]
    """By figure."""
    unmatched_steps: tuple[int, ...]
    """Steps that only one of the runs has."""

    @property
    def is_found(self) -> bool:
        """Whether the runs are apart by more than rounding."""
        return bool(self.unmatched_steps) or self.first is not None

    @property
    def first(self) -> Gap | None:
        """The figure that is first beyond its tolerance."""
        apart = [gap for gap in self.gaps.values() if gap.beyond]
        return min(apart, key=lambda gap: gap.beyond[0][0], default=None)

    def __str__(self) -> str:
        apart = sorted(
            (gap for gap in self.gaps.values() if gap.beyond), key=lambda gap: gap.beyond[0][0]
        )
        missing = [f"only one of the runs has steps {list(self.unmatched_steps)}"]
        return "; ".join([*missing[: len(self.unmatched_steps)], *map(str, apart)]) or "none"


@dataclass(frozen=True, kw_only=True)
class WeightGap:
    """The tensor by which two sets of weights differ most."""

    largest: float
    name: str


def relative(a: float | None, b: float | None) -> float:
    """Return |a - b| / max(|a|, |b|), inf where one alone is None or one is not finite."""
    if a == b:
        return 0.0
    if a is None or b is None:
        return math.inf
    size = abs(a - b) / max(abs(a), abs(b))
    return size if math.isfinite(size) else math.inf


def compare_rows(
    reference_rows: Sequence[Row],
    rows: Sequence[Row],
    *,
    tolerances: Mapping[str, float] = TOLERANCES,
) -> Divergence:
    """Compare the figures that `tolerances` names at every step of two runs."""
    assert reference_rows, "a reference without a step agrees with everything"
    theirs, ours = ({int(row["step"]): row for row in each} for each in (reference_rows, rows))
    shared = sorted(theirs.keys() & ours.keys())
    gaps = {}
    for figure, tolerance in tolerances.items():
        sizes = [
            (step, relative(*(rows[step].get(figure, math.nan) for rows in (theirs, ours))))
            for step in shared
        ]
        gaps[figure] = Gap(
            figure=figure,
            tolerance=tolerance,
            largest=max((size for _, size in sizes), default=0.0),
            beyond=tuple((step, size) for step, size in sizes if size > tolerance),
        )
    return Divergence(gaps=gaps, unmatched_steps=tuple(sorted(theirs.keys() ^ ours.keys())))


def compare_weights(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> WeightGap:
    """Return the largest difference of any tensor, relative to that tensor's largest element.

    A tensor that only one side has, or has in another shape, differs by inf.
    """
    gaps = [
        WeightGap(largest=_tensor_gap(reference[name], weights[name]), name=name)
        if name in reference and name in weights
        else WeightGap(largest=math.inf, name=name)
        for name in sorted({*reference, *weights})
    ]
    assert gaps, "no weights agree with everything"
    return max(gaps, key=lambda gap: gap.largest)


def _tensor_gap(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    wide_a, wide_b = a.double(), b.double()
    largest = max(wide_a.abs().max().item(), wide_b.abs().max().item())
    gap = (wide_a - wide_b).abs().max().item() / largest
    return gap if math.isfinite(gap) else math.inf


def first_unequal(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Say which tensor is the first not to be equal bit for bit; "" if all are."""
    for name in sorted({*reference, *weights}):
        if name not in reference or name not in weights:
            return f"{name}: only in {'the reference' if name in reference else 'this layout'}"
        _, text = tensor_difference(reference[name], weights[name], tolerance=0.0)
        if text:
            return f"{name}: {text}"
    return ""
