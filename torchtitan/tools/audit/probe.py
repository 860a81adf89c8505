"""What a step looks like from inside: outputs, gradients and weights, and the loss of each token.

A mean square is the same whether a rank has a part of a tensor, all of it or a copy of another
rank's, and so needs no knowledge of the layout; sums over parameters are weighed by the number of
copies.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torchtitan.models.init import local_part
from torchtitan.optim.clip import num_copies
from torchtitan.optim.loss import _Head, _OwnHead
from torchtitan.tools.audit.watch import Watch


class Probe(Watch):
    """Looks into a step that is trained again."""

    def __init__(self, folder: Path, rank: int) -> None:
        super().__init__(folder, rank)
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._parameters: dict[str, Tensor] = {}
        self._heads: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])

    def begin(self) -> None:
        """Hook modules and losses."""
        self.hook_modules(self._see_output)
        for head in (_Head, _OwnHead):
            self.replace(head, "_loss", self._see_losses)

    @torch.no_grad()
    def _see_output(self, name: str, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.ndim:
            local = local_part(output.detach()).double()
            largest = local.abs().max() if local.numel() else local.new_zeros(())
            numbers = [float(local.square().sum()), float(largest), float(local.numel())]
            self._outputs[name].append(torch.tensor(numbers, dtype=torch.float64))

    def _see_losses(
        self,
        compute: object,
        losses: Tensor,
        head: object,
        logits: Tensor,
        labels: Tensor,
        *,
        slope: bool,
    ) -> None:
        self._heads[slope].append((labels.cpu().clone(), losses.detach().cpu().clone()))

    @torch.no_grad()
    def see_gradients(self) -> None:
        """Note the gradients as the update gets them, and the weights before it."""
        for name, p in self.run.model.named_parameters():
            if p.grad is None:
                continue
            grad, weight = (local_part(x.detach()).double() for x in (p.grad, p))
            largest = grad.abs().max() if grad.numel() else grad.new_zeros(())
            squares = [x.square().sum() / num_copies(p.grad) for x in (grad, weight)]
            self._parameters[name] = torch.stack([*squares, largest]).cpu()

    def seen(self) -> dict[str, Any]:
        """Return it; tokens and losses on one of the ranks that have the same."""
        run = self.run
        # where gradients are computed later, in a backward pass, the losses are so once more
        losses = self._heads[False] or self._heads[True]
        is_told = run.execution.owns_loss and run.mesh.data.get_local_rank("tp") == 0
        return {
            "outputs": {name: torch.stack(seen) for name, seen in self._outputs.items()},
            "parameters": self._parameters,
            "dp_rank": run.mesh.dp_rank,
            "tokens": self.batches if is_told else [],
            "losses": losses if is_told else [],
        }
