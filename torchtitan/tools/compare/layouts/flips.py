"""Compare the experts that two trainings chose for each token.

A choice changes where two scores nearly tie and rounding decides. Such a flip is not a mistake, but
it changes the gradients of two experts, and the trainings are different from then on. So each
layout sends its tokens to the reference's experts, everything else must agree, and the choices it
would have made are compared here.

The margin of a flip is the difference in the reference's scores between the expert it took and the
one it left out. It must be of the size of rounding. With groups of experts a flip may be a flip of
groups; then the margin is the difference of the groups' scores.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torchtitan.tools.compare.layouts.gaps import MARGIN_TOLERANCE
from torchtitan.tools.compare.layouts.routing import read_choices


@dataclass(kw_only=True)
class Flips:
    """The choices of a run compared with the reference's, over all steps and layers."""

    tolerance: float = MARGIN_TOLERANCE
    num_choices: int = 0
    """Number of tokens in all layers; each is sent to several experts."""
    num_flips: int = 0
    """Number of them with different experts."""
    first_step: int | None = None
    """First step with a flip in any layer."""
    largest_margin: float = 0.0
    layer: str = ""
    """Layer with the largest margin."""
    problem: str = ""
    """Set if a token was not routed exactly once."""

    @property
    def complaint(self) -> str:
        """The flip that rounding does not explain, or ""."""
        if self.problem or self.largest_margin <= self.tolerance:
            return self.problem
        return (
            f"experts differ from step {self.first_step}, in layer {self.layer} "
            f"by a margin of {self.largest_margin:.2g} (tolerance {self.tolerance:g})"
        )

    def __str__(self) -> str:
        text = f"{self.num_choices:,} choices, {self.num_flips} flipped"
        if self.num_flips:
            text += f" from step {self.first_step}, margins up to {self.largest_margin:.1e}"
        return text


def compare_choices(
    reference: Path,
    run_folder: Path,
    *,
    num_steps: int,
    groups: tuple[int, int] = (1, 1),
    tolerance: float = MARGIN_TOLERANCE,
) -> Flips:
    """Compare the recorded choices of two runs.

    `reference` is a folder of `watch_routing`, `other` that of the run that replayed it. `groups`:
    number of groups of experts, and how many of them a token chooses from. `tolerance` is the
    allowed margin of a flip.
    """
    result = Flips(tolerance=tolerance)
    for step in range(1, num_steps + 1):
        a, b = read_choices(reference, step), read_choices(run_folder, step)
        for layer in sorted({*a, *b}, key=int):
            if layer not in a or layer not in b or not a[layer]["names"].equal(b[layer]["names"]):
                result.problem = (
                    f"layer {layer} routes different tokens in step {step}, or routes one twice"
                )
                return result
            x, y = a[layer], b[layer]
            is_flip_T = (x["ids"].sort().values != y["ids"].sort().values).any(-1)
            result.num_choices += len(is_flip_T)
            if not is_flip_T.any():
                continue
            result.num_flips += int(is_flip_T.sum())
            result.first_step = result.first_step or step
            flips = [record[key][is_flip_T] for key in ("scores", "ids") for record in (x, y)]
            margin = _margins(*flips, groups=groups).max().item()
            if margin > result.largest_margin:
                result.largest_margin, result.layer = margin, layer
    return result


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
