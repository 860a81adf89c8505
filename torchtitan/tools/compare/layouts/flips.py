"""Compare the experts that two trainings chose for each token.

A choice changes where two scores nearly tie and rounding decides. Such a flip is not a mistake, but
it changes the gradients of two experts, and the trainings are different from then on. So layouts
are compared twice. *Replayed*: each layout sends its tokens to the reference's experts, everything
else must agree, and the choices it would have made are compared. *Free*: each layout chooses, and
figures must agree up to the first step with a flip.

The margin of a flip is the difference in the reference's scores between the expert it took and the
one it left out. It must be of the size of rounding. In a free run only the first layer with flips
in the first such step is judged, because later flips follow from it. With groups of experts a flip
may be a flip of groups; then the margin is the difference of the groups' scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.tools.compare.layouts.gaps import MARGIN_TOLERANCE
from torchtitan.tools.compare.layouts.routing import read_choices


@dataclass(kw_only=True)
class LayerFlips:
    """The choices of one layer compared with the reference's, over all steps."""

    layer: str
    num_choices: int = 0
    """Number of tokens; each is sent to several experts."""
    num_flips: int = 0
    """Number of tokens with different experts."""
    largest_margin: float = 0.0
    """Largest margin of the judged flips."""
    largest_gap: float = 0.0
    """Largest difference of a token's score, in the judged steps."""

    def add(
        self,
        a: dict[str, Tensor],
        b: dict[str, Tensor],
        *,
        groups: tuple[int, int],
        is_judged: bool,
    ) -> bool:
        """Add one step, and return whether a choice flipped."""
        is_flip_T = (a["ids"].sort().values != b["ids"].sort().values).any(-1)
        self.num_choices += len(is_flip_T)
        self.num_flips += int(is_flip_T.sum())
        if is_judged and len(is_flip_T):
            gap = (a["scores"] - b["scores"]).abs().max().item()
            self.largest_gap = max(self.largest_gap, gap)
            flips = [x[key][is_flip_T] for key in ("scores", "ids") for x in (a, b)]
            margins_F = _margins(*flips, groups=groups)
            self.largest_margin = max([self.largest_margin, *margins_F.tolist()])
        return bool(is_flip_T.any())


@dataclass(frozen=True, kw_only=True)
class Flips:
    """The choices of a run compared with the reference's."""

    layers: tuple[LayerFlips, ...]
    first_step: int | None
    """First step with a flip in any layer."""
    problem: str = ""
    """Set if a token was not routed exactly once."""
    tolerance: float = MARGIN_TOLERANCE

    @property
    def num_flips(self) -> int:
        """Number of flips in all layers."""
        return sum(each.num_flips for each in self.layers)

    @property
    def largest_margin(self) -> float:
        """Largest margin in any layer."""
        return max((each.largest_margin for each in self.layers), default=0.0)

    @property
    def complaint(self) -> str:
        """The flip that rounding does not explain, or ""."""
        if self.problem or self.largest_margin <= self.tolerance:
            return self.problem
        worst = max(self.layers, key=lambda each: each.largest_margin)
        return (
            f"experts were chosen otherwise from step {self.first_step}, in layer {worst.layer} "
            f"against a margin of {worst.largest_margin:.2g} (tolerance {self.tolerance:g})"
        )

    def __str__(self) -> str:
        num = sum(each.num_choices for each in self.layers)
        if not self.num_flips:
            return f"{num:,} choices, 0 flipped"
        by_layer = ", ".join(f"{each.layer}: {each.num_flips}" for each in self.layers)
        return (
            f"{num:,} choices, {self.num_flips} flipped from step {self.first_step} (by layer "
            f"{by_layer}), margins up to {self.largest_margin:.1e}"
        )


def compare_choices(
    reference: Path,
    other: Path,
    *,
    num_steps: int,
    replayed: bool,
    groups: tuple[int, int] = (1, 1),
    tolerance: float = MARGIN_TOLERANCE,
) -> Flips:
    """Compare the recorded choices of two runs.

    Args:
        reference: Folder of `watch_routing`.
        other: The same of the compared run.
        num_steps: Steps to compare.
        replayed: Whether the other run used the reference's choices.
        groups: Number of groups of experts, and how many of them a token chooses from.
        tolerance: Allowed margin of a flip.
    """
    first, problem = None, ""
    layers: dict[str, LayerFlips] = {}
    for step in range(1, num_steps + 1):
        a, b = read_choices(reference, step), read_choices(other, step)
        for layer in sorted({*a, *b}, key=int):
            if layer not in a or layer not in b or not a[layer]["names"].equal(b[layer]["names"]):
                problem = (
                    problem or f"layer {layer} routes other tokens in step {step}, or not once"
                )
                continue
            flips = layers.setdefault(layer, LayerFlips(layer=layer))
            is_judged = replayed or first is None
            if flips.add(a[layer], b[layer], groups=groups, is_judged=is_judged):
                first = first or step
    return Flips(
        layers=tuple(layers.values()), first_step=first, problem=problem, tolerance=tolerance
    )


def _margins(
    scores_FE: Tensor,
    our_scores_FE: Tensor,
    ids_FK: Tensor,
    our_ids_FK: Tensor,
    *,
    groups: tuple[int, int],
) -> Tensor:
    """Return the margin of each flip."""
    is_in, is_in_ours = (_mask(scores_FE, ids) for ids in (ids_FK, our_ids_FK))
    margins_F = _preferred(scores_FE, is_in, is_in_ours)
    num_groups, kept = groups
    if kept == num_groups:
        return margins_F
    best_FG, our_best_FG = (
        x.unflatten(-1, (num_groups, -1)).topk(min(2, x.shape[-1] // num_groups)).values.sum(-1)
        for x in (scores_FE, our_scores_FE)
    )
    is_in, is_in_ours = (_mask(x, x.topk(kept).indices) for x in (best_FG, our_best_FG))
    of_groups_F = _preferred(best_FG, is_in, is_in_ours)
    return torch.where((is_in != is_in_ours).any(-1), of_groups_F, margins_F)


def _mask(like: Tensor, ids: Tensor) -> Tensor:
    return torch.zeros_like(like, dtype=torch.bool).scatter(-1, ids, True)


def _preferred(scores: Tensor, is_in: Tensor, is_in_ours: Tensor) -> Tensor:
    taken = scores.masked_fill(~is_in | is_in_ours, torch.inf).amin(-1)
    left_out = scores.masked_fill(~is_in_ours | is_in, -torch.inf).amax(-1)
    return (taken - left_out).abs()
