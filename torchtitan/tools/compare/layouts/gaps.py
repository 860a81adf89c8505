"""How far two trainings of the same job are apart: by figures, by gradients and by weights.

Layouts add in another order, so that digits differ, and in float32 about 1e-7 of a figure is one
digit. Figures are compared by |a - b| / max(|a|, |b|). What was read from the data, or computed
from the step alone, has no sum in it and must be equal: a difference there is no rounding.

Gradients say most, and are compared tensor by tensor in the first steps, by |a - b| / |a| in the
2-norm. A factor of 1.001 in one tensor is 1e-3 there, where neither loss nor global norm shows it,
and where Adam makes the same update of both. The first step starts from equal weights: what differs
is the layout's own doing, by 3e-7. Later ones inherit what the optimizer made of it.

Adam makes much of it. Its update of an element is lr u, u = m / (sqrt(v) + eps), where m and v
average g and g^2 with weights a_i and b_i; by Cauchy and Schwarz |u| <= r = sqrt(sum a_i^2 / b_i),
1 in the first step and about 1.2 later with betas 0.9 and 0.95, however small g is. So where |g| is
below the error d of rounding, two right layouts may step in opposite directions, 2 r lr apart, and
no bound for single elements is less than twice the path that they went: each pair of trainings
would pass. But such elements are few. If rounding is a fraction t of the tensor's typical gradient,
u changes by min(2, t/x) at an element x times the typical one; with a density of about 0.8 near
x = 0 (that of |N(0, 1)|) its mean square is

    0.8 (integral of 4 up to t/2, and of (t/x)^2 from there) = 0.8 (2t + 2t) = 3.2 t

So over a whole tensor the updates differ by up to 1.8 sqrt(t) of themselves: 6e-4 for t = 1e-7 and
1e-2 for t = 3e-5. (The first step is the worst, 1.1 sqrt(t); later v averages over several g.)

Weights are therefore compared by |a - b| / |a - start|, both in the 2-norm: how much of its way
each tensor went differently. A rate, a decay or a parameter that is wrong changes that by more, and
a parameter that must not move has no way, and may not differ in a bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchtitan.metrics.rows import Row
from torchtitan.tools.compare.compare_runs import tensor_difference

TOLERANCES: Mapping[str, float] = {
    "loss": 1e-5,
    "grad_norm": 1e-4,
    "lr": 0.0,
    "num_tokens": 0.0,
    "valid_token_fraction": 0.0,
}
"""Relative difference of each figure that rounding in float32 explains."""
GRADIENTS_TOLERANCE = 1e-4
WEIGHTS_TOLERANCE = 1e-2
LEAST_SHARE = 1e-5
"""Of the global norm: a gradient smaller than that is compared as if it were so large, since where
terms cancel to nothing only their rounding is left."""


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
class TensorGap:
    """The tensor by which two sets of tensors differ most."""

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


def compare_gradients(
    reference: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> TensorGap:
    """Return the largest difference of any gradient, relative to its own norm.

    A gradient that only one side has, or has in another shape, differs by inf.
    """
    least = LEAST_SHARE * math.hypot(*(_norm(reference[name]) for name in reference))
    return _largest(
        (name, _gap(a, b, size=max(_norm(a), least))) for name, a, b in _pairs(reference, gradients)
    )


def compare_weights(
    start: Mapping[str, Tensor], reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> TensorGap:
    """Return the largest difference of any tensor, relative to how far the reference's went from
    `start`.

    A tensor that only one side has, or has in another shape, differs by inf.
    """
    return _largest(
        (name, _gap(a, b, size=_norm(a - start[name]) if name in start else 0.0))
        for name, a, b in _pairs(reference, weights)
    )


def largest_move(start: Mapping[str, Tensor], end: Mapping[str, Tensor]) -> float:
    """Return how far any weight moved, relative to the largest of its tensor."""
    return max(
        (end[name] - start[name]).abs().max().item() / (largest or 1.0)
        for name in end
        for largest in [torch.stack([start[name], end[name]]).abs().max().item()]
    )


def _pairs(
    reference: Mapping[str, Tensor], others: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield tensors of one name, one pair at a time; for one that is missing, an empty one."""
    nothing = torch.empty(0)
    for name in sorted({*reference, *others}):
        yield name, reference.get(name, nothing), others.get(name, nothing)


def _largest(sizes: Iterator[tuple[str, float]]) -> TensorGap:
    gaps = [TensorGap(name=name, largest=size) for name, size in sizes]
    assert gaps, "no tensors agree with everything"
    return max(gaps, key=lambda gap: gap.largest)


def _gap(a: Tensor, b: Tensor, *, size: float) -> float:
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    gap = _norm(a - b) / size if size else math.inf
    return gap if math.isfinite(gap) else math.inf


def _norm(tensor: Tensor) -> float:
    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def first_unequal(reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> str:
    """Say which tensor is the first not to be equal bit for bit; "" if all are."""
    for name in sorted({*reference, *weights}):
        if name not in reference or name not in weights:
            return f"{name}: only in {'the reference' if name in reference else 'this layout'}"
        _, text = tensor_difference(reference[name], weights[name], tolerance=0.0)
        if text:
            return f"{name}: {text}"
    return ""
