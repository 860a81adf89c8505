"""Where two trainings of a model with experts send their tokens, and how near each difference was.

A choice jumps where two scores nearly tie, and rounding may decide it. Such a flip is no mistake,
but after it the trainings are two: it changes the gradients of two experts at once. So layouts are
compared twice. *Replayed*, each sends its tokens where the reference did, and all else must agree;
what it would have chosen is written down and compared too. *Free*, each chooses for itself, and
figures must agree up to the first step with a flip. In both a flip's margin, by which the
reference's scores preferred the expert it took to the one it left out, must be rounding. In a free
run that is asked of the first layer with flips of the first such step: what follows inherits them.

With groups of experts a flip may be one of groups; then its margin is that of their scores.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.tools.compare.layouts.routing import read_choices

MARGIN_TOLERANCE = 1e-5
"""Of scores that are at most about 1."""


@dataclass(frozen=True, kw_only=True)
class LayerFlips:
    """How one layer's choices compare with the reference's, over all steps."""

    layer: str
    num_choices: int
    """Tokens, each of which is sent to several experts."""
    num_flips: int
    """Tokens that are sent to other ones."""
    largest_margin: float
    """Of the flips that are judged."""
    largest_gap: float
    """Between the two scores of a token and expert, as far as flips are judged."""


@dataclass(frozen=True, kw_only=True)
class Flips:
    """How the choices of a run compare with the reference's."""

    layers: tuple[LayerFlips, ...]
    first_step: int | None
    """With a flip in any layer."""
    problem: str = ""
    """That a token was not routed once."""
    tolerance: float = MARGIN_TOLERANCE

    @property
    def num_flips(self) -> int:
        """Number of flips in all layers."""
        return sum(each.num_flips for each in self.layers)

    @property
    def largest_margin(self) -> float:
        """That of any layer."""
        return max((each.largest_margin for each in self.layers), default=0.0)

    @property
    def complaint(self) -> str:
        """Say what rounding does not explain; nothing where there is none."""
        if self.problem:
            return self.problem
        worst = max(self.layers, key=lambda each: each.largest_margin, default=None)
        if worst is None or worst.largest_margin <= self.tolerance:
            return ""
        return (
            f"experts were chosen otherwise from step {self.first_step}, in layer {worst.layer} "
            f"against a margin of {worst.largest_margin:.2g} (tolerance {self.tolerance:g})"
        )

    def __str__(self) -> str:
        num = sum(each.num_choices for each in self.layers)
        if not self.num_flips:
            return f"{num:,} choices, none flipped"
        by_layer = ", ".join(f"{each.layer}: {each.num_flips}" for each in self.layers)
        return (
            f"{num:,} choices, {self.num_flips} flipped from step {self.first_step} (by layer "
            f"{by_layer}), margins up to {self.largest_margin:.1e}"
        )


def compare_choices(
    reference: Path,
    ours: Path,
    *,
    num_steps: int,
    replayed: bool,
    groups: tuple[int, int] = (1, 1),
    tolerance: float = MARGIN_TOLERANCE,
) -> Flips:
    """Compare what two runs wrote down; `groups` are those of experts, and the chosen ones."""
    first, problem = None, ""
    found: dict[str, _Counts] = defaultdict(_Counts)
    for step in range(1, num_steps + 1):
        a, b = read_choices(reference, step), read_choices(ours, step)
        for layer in sorted({*a, *b}, key=int):
            if layer not in a or layer not in b or not a[layer]["names"].equal(b[layer]["names"]):
                problem = (
                    problem or f"layer {layer} routes other tokens in step {step}, or not once"
                )
                continue
            is_judged = replayed or first is None
            if found[layer].add(a[layer], b[layer], groups=groups, is_judged=is_judged):
                first = first or step
    layers = tuple(LayerFlips(layer=layer, **vars(counts)) for layer, counts in found.items())
    return Flips(layers=layers, first_step=first, problem=problem, tolerance=tolerance)


@dataclass
class _Counts:
    """The figures of `LayerFlips`, step by step."""

    num_choices: int = 0
    num_flips: int = 0
    largest_margin: float = 0.0
    largest_gap: float = 0.0

    def add(
        self,
        a: dict[str, Tensor],
        b: dict[str, Tensor],
        *,
        groups: tuple[int, int],
        is_judged: bool,
    ) -> bool:
        """Add those of one step; tell whether any choice flipped."""
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


def _margins(
    scores_FE: Tensor,
    ours_FE: Tensor,
    ids_FK: Tensor,
    our_ids_FK: Tensor,
    *,
    groups: tuple[int, int],
) -> Tensor:
    """Return by how much the reference's scores preferred what it chose, for each flip."""
    is_in, is_in_ours = (
        torch.zeros_like(scores_FE, dtype=torch.bool).scatter(-1, ids, True)
        for ids in (ids_FK, our_ids_FK)
    )
    margins_F = _preferred(scores_FE, is_in, is_in_ours)
    num_groups, kept = groups
    if kept == num_groups:
        return margins_F
    best_FG, our_best_FG = (
        x.unflatten(-1, (num_groups, -1)).topk(min(2, x.shape[-1] // num_groups)).values.sum(-1)
        for x in (scores_FE, ours_FE)
    )
    is_in, is_in_ours = (
        torch.zeros_like(best_FG, dtype=torch.bool).scatter(-1, x.topk(kept).indices, True)
        for x in (best_FG, our_best_FG)
    )
    of_groups_F = _preferred(best_FG, is_in, is_in_ours)
    return torch.where((is_in != is_in_ours).any(-1), of_groups_F, margins_F)


def _preferred(scores: Tensor, is_in: Tensor, is_in_ours: Tensor) -> Tensor:
    taken = scores.masked_fill(~is_in | is_in_ours, torch.inf).amin(-1)
    left_out = scores.masked_fill(~is_in_ours | is_in, -torch.inf).amax(-1)
    return (taken - left_out).abs()
