"""The comparer: how far two trainings of the same job are apart, in figures, gradients and weights.

Layouts add in different orders, so their results differ by rounding. In float32 that is about 1e-7
of a figure. Figures are compared by |a - b| / max(|a|, |b|). A figure that is read from the data or
computed from the step contains no such sum, so it must be equal.

Gradients are the most sensitive. Each tensor of the first steps is compared by |a - b| / |a| in the
2-norm. A factor of 1.001 in one tensor gives 1e-3 there, but shows in neither the loss nor the
global norm, and Adam makes the same update from it. The first step starts from equal weights, so
its gradients differ by the rounding of the layout, about 3e-7. Later steps inherit what Adam
amplified.

Adam updates an element by lr u, u = m / (sqrt(v) + eps), where m and v average g and g^2 with
weights a_i and b_i. By Cauchy and Schwarz |u| <= r = sqrt(sum a_i^2 / b_i), which is 1 in the first
step and about 1.2 later with betas 0.9 and 0.95, for any g. So where |g| is below the rounding
error d, two correct layouts may step in opposite directions, 2 r lr apart. A bound on single
elements would have to allow twice the distance they moved, and every pair of trainings would pass.
But such elements are rare. If rounding is a fraction t of the tensor's typical gradient, u changes
by min(2, t/x) at an element of x times the typical one. With a density of about 0.8 near x = 0
(the density of |N(0, 1)|), its mean square is

    0.8 (integral of 4 up to t/2, and of (t/x)^2 from there) = 0.8 (2t + 2t) = 3.2 t

So over a tensor the updates differ by up to 1.8 sqrt(t) of themselves: 6e-4 for t = 1e-7 and 1e-2
for t = 3e-5. (The first step is the worst, 1.1 sqrt(t); later v averages over several g.)

Weights are therefore compared by |a - b| / |a - start| in the 2-norm: the share of a tensor's
movement that differs. A wrong learning rate, decay or parameter changes more. A parameter that must
not move may not differ in any bit.

This module imports torch only inside functions, because `--help` prints the tolerances.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

TOLERANCES: Mapping[str, float] = {
    "loss": 1e-5,
    "grad_norm": 1e-4,
    "lr": 0.0,
    "num_tokens": 0.0,
    "valid_token_fraction": 0.0,
}
"""Allowed relative difference of each figure, for float32."""
GRADIENTS_TOLERANCE = 1e-4
WEIGHTS_TOLERANCE = 1e-2
LEAST_SHARE = 1e-5
"""A gradient smaller than this share of the global norm is compared with this share instead: where
terms cancel, only their rounding is left."""


@dataclass(frozen=True, kw_only=True)
class Gap:
    """The difference of one figure over all steps."""

    figure: str
    tolerance: float
    largest: float
    """Largest relative difference of any step."""
    beyond: tuple[tuple[int, float], ...]
    """(step, difference) of each step beyond the tolerance."""

    def __str__(self) -> str:
        step, size = self.beyond[0]
        return (
            f"step {step}, {self.figure}: differs by {size:.2g}, in any step by at most "
            f"{self.largest:.2g} (tolerance {self.tolerance:g})"
        )


class TensorGap(NamedTuple):
    """A tensor and its difference."""

    largest: float
    name: str


def relative(a: float | None, b: float | None) -> float:
    """Return |a - b| / max(|a|, |b|), or inf if only one is None or one is not finite."""
    if a == b:
        return 0.0
    if a is None or b is None:
        return math.inf
    size = abs(a - b) / max(abs(a), abs(b))
    return size if math.isfinite(size) else math.inf


def compare_rows(
    reference_rows: Sequence[Mapping[str, Any]],
    rows: Sequence[Mapping[str, Any]],
    *,
    tolerances: Mapping[str, float] = TOLERANCES,
) -> dict[str, Gap]:
    """Compare the figures in `tolerances` at every step. One that a run lacks differs by inf. If a
    step has two rows, the later one counts.

    The figure that is first beyond its tolerance comes first.
    """
    a, b = ({int(row["step"]): row for row in run_rows} for run_rows in (reference_rows, rows))
    gaps = []
    for figure, tolerance in tolerances.items():
        assert any(figure in row for row in (*a.values(), *b.values())), f"no row has {figure}"
        sizes = [
            (step, relative(a.get(step, {}).get(figure), b.get(step, {}).get(figure)))
            for step in sorted(a.keys() | b.keys())
        ]
        gap = Gap(
            figure=figure,
            tolerance=tolerance,
            largest=max(size for _, size in sizes),
            beyond=tuple((step, size) for step, size in sizes if size > tolerance),
        )
        gaps.append(gap)
    gaps.sort(key=lambda gap: gap.beyond[0][0] if gap.beyond else math.inf)
    return {gap.figure: gap for gap in gaps}


def compare_gradients(
    reference: Mapping[str, Tensor], gradients: Mapping[str, Tensor]
) -> TensorGap:
    """Return the largest difference of a gradient, relative to its norm.

    A gradient that is missing on one side, or has another shape there, differs by inf.
    """
    least = LEAST_SHARE * math.hypot(*(_norm(reference[name]) for name in reference))
    return _largest_gap(reference, gradients, size=lambda name, a: max(_norm(a), least))


def compare_weights(
    start: Mapping[str, Tensor], reference: Mapping[str, Tensor], weights: Mapping[str, Tensor]
) -> TensorGap:
    """Return the largest difference of a tensor, relative to the reference's distance from `start`.

    A tensor that is missing on one side, or has another shape there, differs by inf.
    """
    return _largest_gap(
        reference, weights, size=lambda name, a: _norm(a - start[name]) if name in start else 0.0
    )


def _largest_gap(
    reference: Mapping[str, Tensor],
    tensors: Mapping[str, Tensor],
    *,
    size: Callable[[str, Tensor], float],
) -> TensorGap:
    """Compare tensor by tensor. `size` returns the size that a difference is divided by."""
    gaps = []
    for name in sorted({*reference, *tensors}):
        gap = math.inf
        if name in reference and name in tensors:
            a, b = reference[name], tensors[name]
            if a.shape == b.shape and a.dtype == b.dtype:
                gap = _relative_norm(a, b, size=size(name, a))
        gaps.append(TensorGap(gap, name))
    assert gaps, "empty mappings would agree with every layout"
    return max(gaps, key=lambda gap: gap.largest)


def _relative_norm(a: Tensor, b: Tensor, *, size: float) -> float:
    if a.equal(b):
        return 0.0
    gap = _norm(a - b) / size if size else math.inf
    return gap if math.isfinite(gap) else math.inf


def _norm(tensor: Tensor) -> float:
    import torch

    return torch.linalg.vector_norm(tensor, dtype=torch.float64).item()


def compare_tensors(
    a: Mapping[str, Tensor], b: Mapping[str, Tensor], *, tolerance: float = 0.0
) -> Iterator[tuple[str, float, str]]:
    """Yield name, largest difference and a description of each tensor that differs.

    Without a tolerance all bits must be equal. A tolerance is relative to the largest element of a
    tensor, whose rounding a sum in another order changes.
    """
    for name in sorted({*a, *b}):
        if name in a and name in b:
            gap, text = tensor_difference(a[name], b[name], tolerance=tolerance)
        else:
            gap, text = 0.0, f"only in {'A' if name in a else 'B'}"
        if text:
            yield name, gap, text


def tensor_difference(a: Tensor, b: Tensor, *, tolerance: float) -> tuple[float, str]:
    """Return the largest difference and a description, which is "" if the tensors are equal."""
    import torch

    if a.shape != b.shape or a.dtype != b.dtype:
        return 0.0, f"{a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    flat_a, flat_b = (t.contiguous().reshape(-1) for t in (a, b))
    if torch.equal(flat_a.view(torch.uint8), flat_b.view(torch.uint8)):
        return 0.0, ""
    wide_a, wide_b = flat_a.double(), flat_b.double()
    gap = (wide_a - wide_b).abs()
    same = (wide_a == wide_b) | (wide_a.isnan() & wide_b.isnan())
    gap[same] = 0.0
    largest = max(wide_a.abs().max().item(), wide_b.abs().max().item())
    outside = ~same & ~(gap <= tolerance * largest)
    if not outside.any():
        return 0.0, "" if tolerance else "equal numbers with different bits (-0.0 or nan)"
    first = int(outside.nonzero()[0])
    index = [int(i) for i in torch.unravel_index(torch.tensor(first), a.shape)]
    size = float(gap.nan_to_num(nan=float("inf")).max())
    return size, (
        f"{int(outside.sum())} of {a.numel()} elements, first {index}: {flat_a[first].item()!r} "
        f"and {flat_b[first].item()!r}, by at most {size:.3g}"
    )
