"""What a mixture of experts must be, so that it trains, shards and saves in every layout.

Three base classes, by which layouts find what they change: `Routes` sends tokens to experts,
`ChoosesExperts` decides which, `StackedExperts` holds and multiplies. What is changed are
attributes alone, so that a model knows of no other rank; `models/moe.py` is such a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

Compute = Callable[[torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""From rows (N, C), sorted by expert, how many each expert gets (E), and the stacked weights to the
rows that come of them (N, C)."""
Exchange = Callable[[Compute, torch.Tensor, torch.Tensor, Sequence[torch.Tensor]], torch.Tensor]
"""Has rows multiplied where their experts are; it takes what `Compute` takes, behind that."""


def multiply_here(
    compute: Compute,
    x_NC: torch.Tensor,
    counts_E: torch.Tensor,
    weights: Sequence[torch.Tensor],
) -> torch.Tensor:
    """Multiply rows on the rank that has them: the `Exchange` where every expert is at hand."""
    return compute(x_NC, counts_E, weights)


class StackedExperts(nn.Module):
    """A module whose parameters are experts, stacked along the first dimension.

    A token is multiplied by `num_chosen` of them. What it computes depends on how many tokens each
    expert gets, so it is left out of compiled graphs. It has its rows multiplied by
    `exchange(compute, rows, counts, weights)`: expert parallelism replaces `exchange` by a function
    that takes them to the ranks of their experts.
    """

    num_chosen: int
    compute: Compute

    def __init__(self) -> None:
        super().__init__()
        self.exchange: Exchange = multiply_here


class ChoosesExperts(nn.Module):
    """A module that scores experts and chooses some for each token by `choose`, and by that alone.

    `choose` is replaced by a function that keeps the choice for a block that is recomputed. The
    other two follow the choices of training (`optim/balance.py`), not those made without gradients.
    """

    choose: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]
    """From scores (B, S, E) without gradient, and the experts' bias, to experts (B, S, K), int64;
    it calls `on_choice`."""
    on_choice: Callable[[torch.Tensor, torch.Tensor], None] | None
    """Hears of each choice once, however often a block is recomputed: scores and experts."""
    extra_loss: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None
    """From logits and scores (B, S, E) and the chosen experts to a scalar whose gradients are added
    to those of the model's loss; None: nothing is."""


class Routes(nn.Module):
    """A module that sends tokens (B, S, C) to `experts`, by `route`.

    Each rank routes its own tokens. Under tensor parallelism without sequence parallelism, where
    several ranks hold the same ones, `route` is replaced by a function that deals them out.
    """

    router: ChoosesExperts
    experts: StackedExperts
    shared_experts: nn.Module | None
    """To which every token is sent."""
    route: Callable[[torch.Tensor], torch.Tensor]
    expert_bias: nn.Parameter | None
    """Added to the experts' scores in choosing alone (E), float32. No gradient trains it: it is
    kept whole on every rank, and balances the load (`optim/balance.py`)."""


def find_routes(model: nn.Module) -> dict[str, Routes]:
    """Return the modules that send tokens to experts, by their names."""
    return {name: module for name, module in model.named_modules() if isinstance(module, Routes)}


def untrained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are state and never trained, whole on every rank: the biases."""
    return [
        module.expert_bias
        for module in model.modules()
        if isinstance(module, Routes) and module.expert_bias is not None
    ]
