"""What a step looks like from inside: a callback that watches one step on every rank.

It reads and changes nothing: outputs of modules, gradients and weights, and the loss of each token.
Each rank writes what it has seen into `replay/rank_R.pt` of its folder; `replay.py` puts the ranks'
parts together. A mean square is the same whether a rank has a part of a tensor, all of it or a copy
of another rank's, and so needs no knowledge of the layout; sums over parameters are weighed by the
number of copies.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from torchtitan.models.init import local_part
from torchtitan.optim.clip import num_copies
from torchtitan.optim.loss import _Head, _OwnHead
from torchtitan.trainer import Run

STEP = "TORCHTITAN_REPLAYED_STEP"
FOLDER = "replay"
MOST_DOTS = 2
"""Of a module's name: a layer, its attention and feed-forward, and what these are made of not."""


class Probe:
    """Watches the step that the environment names."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file = folder / FOLDER / f"rank_{rank}.pt"
        self._step = int(os.environ[STEP])
        self._open = ExitStack()
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._parameters: dict[str, Tensor] = {}
        self._tokens: list[dict[str, Tensor]] = []
        self._heads: tuple[list[tuple[Tensor, Tensor]], ...] = ([], [])
        self._run: Run

    def on_start(self, run: Run) -> None:
        """Begin at once, if it is the first step."""
        self._run = run
        self._begin_before(run.progress.step)

    def on_step(self, step: int, row: Mapping[str, object] | None) -> None:
        """Begin behind the step before, and write behind the step itself."""
        self._begin_before(step)
        if step == self._step:
            self._open.close()
            self._write()

    def _begin_before(self, step: int) -> None:
        if step + 1 != self._step:
            return
        run = self._run
        for part in run.model:
            for name, module in part.named_modules():
                if name and name.count(".") <= MOST_DOTS and list(module.children()):
                    hook = module.register_forward_hook(partial(self._see_output, name))
                    self._open.callback(hook.remove)
        hook = run.optimizer.register_step_pre_hook(self._see_parameters)
        self._open.callback(hook.remove)
        self._replace(run.sequence_shard, "take", self._see_batch)
        for head in (_Head, _OwnHead):
            self._replace(head, "_loss", self._see_losses)

    def _replace(self, owner: Any, name: str, seen: Callable[..., Any]) -> None:
        original = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            seen(original, result, *arguments, **named)
            return result

        self._open.enter_context(patch.object(owner, name, watched))

    @torch.no_grad()
    def _see_output(self, name: str, module: nn.Module, inputs: object, output: object) -> None:
        if isinstance(output, Tensor) and output.is_floating_point() and output.ndim:
            local = local_part(output.detach())
            largest = local.abs().max() if local.numel() else local.new_zeros(())
            seen = (local.double().square().sum(), largest.double())
            self._outputs[name].append(torch.tensor([*map(float, seen), local.numel()]).double())

    def _see_batch(self, take: Callable[..., Any], batch: Any, samples: Mapping[str, Any]) -> None:
        """Note a microbatch's part of this rank: tokens, labels, and their places in the sample."""
        places = torch.arange(samples["tokens"].shape[1]).expand_as(samples["tokens"])
        self._tokens.append(
            {
                "tokens": batch.tokens.clone(),
                "labels": batch.labels.clone(),
                "places": take({**samples, "tokens": places}).tokens.clone(),
            }
        )

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
    def _see_parameters(self, *of_the_optimizer: object) -> None:
        """Note the gradients as the update gets them, and the weights before it."""
        for name, p in self._run.model.named_parameters():
            if p.grad is None:
                continue
            grad, weight = (local_part(x.detach()) for x in (p.grad, p))
            largest = grad.abs().max() if grad.numel() else grad.new_zeros(())
            self._parameters[name] = torch.stack(
                [
                    grad.double().square().sum() / num_copies(p.grad),
                    weight.double().square().sum() / num_copies(p.grad),
                    largest.double(),
                ]
            ).cpu()

    def _write(self) -> None:
        run = self._run
        self._file.parent.mkdir(parents=True, exist_ok=True)
        # where gradients are computed later, in a backward pass, the losses are so once more
        losses = self._heads[False] or self._heads[True]
        # ranks along tp hold the same tokens
        is_told = run.execution.owns_loss and run.mesh.data.get_local_rank("tp") == 0
        torch.save(
            {
                "outputs": {name: torch.stack(seen) for name, seen in self._outputs.items()},
                "parameters": self._parameters,
                "dp_rank": run.mesh.dp_rank,
                "tokens": self._tokens if is_told else [],
                "losses": losses if is_told else [],
            },
            self._file,
        )
