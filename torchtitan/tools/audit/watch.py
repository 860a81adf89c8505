"""A callback that records one step on every rank, without changing it.

No tensor is gathered. A rank knows which tokens it has, so each output of a module is recorded as
two numbers per token: the norm of the token's vector and its largest element. A parameter is
recorded by this rank's share of its square sum, and its largest element. Each rank writes
`seen/rank_R.pt`; the command that started the ranks joins them.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.models.init import local_part
from torchtitan.optim.clip import num_copies
from torchtitan.optim.loss import _Head, _OwnHead
from torchtitan.trainer import Run

CALLBACK = "torchtitan.tools.audit.watch:Watch"
STEP = "TORCHTITAN_WATCHED_STEP"
FOLDER = "seen"
MAX_DOTS = 2
"""In a module's name: layers, their norms, attention and feed-forward, and no deeper modules."""
Seen = dict[str, Any]
"""The record of a rank, as `Watch._record` returns it."""


class Watch:
    """Records the step that the environment names."""

    def __init__(self) -> None:
        self._step = int(os.environ[STEP])
        self._run: Run
        self._batches: list[dict[str, Tensor]] = []
        self._outputs: dict[str, list[Tensor]] = defaultdict(list)
        self._widths: dict[str, int] = {}
        self._weights: dict[str, Tensor] = {}
        self._weight_gradients: dict[str, Tensor] = {}
        self._losses: dict[bool, list[tuple[Tensor, Tensor]]] = {False: [], True: []}
        self._undo = ExitStack()

    def on_start(self, run: Run) -> None:
        """Start to record if the first step is the watched one."""
        self._run = run
        self._start_after(run.progress.step)

    def on_step(self, step: int, row: Mapping[str, object] | None) -> None:
        """Start to record after the step before, and write after the watched step."""
        self._start_after(step)
        if step == self._step:
            self._undo.close()
            folder = self._run.folder / FOLDER
            folder.mkdir(parents=True, exist_ok=True)
            torch.save(self._record(), folder / f"rank_{dist.get_rank()}.pt")

    def _start_after(self, step: int) -> None:
        if step + 1 != self._step:
            return
        run = self._run
        self._weights = self._see_parameters(of_gradients=False)
        self._observe(run.sequence_shard, "take", self._see_batch)
        for head in (_Head, _OwnHead):
            self._observe(head, "_loss", self._see_losses)
        for part in run.model:
            for name, module in part.named_modules():
                if name and name.count(".") <= MAX_DOTS:
                    self._hook(name, module)

        def see_gradients(*_: object) -> None:
            self._weight_gradients = self._see_parameters(of_gradients=True)

        self._undo.callback(run.optimizer.register_step_pre_hook(see_gradients).remove)

    def _observe(self, owner: Any, name: str, see: Callable[..., None]) -> None:
        """Call `see` with the function, result and arguments of each call of `owner.name`."""
        function = getattr(owner, name)

        def observed(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            see(function, result, *args, **kwargs)
            return result

        setattr(owner, name, observed)
        self._undo.callback(setattr, owner, name, function)

    def _see_batch(self, take: Callable[..., Any], batch: Any, samples: Mapping[str, Any]) -> None:
        places = torch.arange(samples["tokens"].shape[1]).expand_as(samples["tokens"])
        taken = take({**samples, "tokens": places}).tokens
        seen = {"tokens": batch.tokens, "labels": batch.labels, "places": taken}
        self._batches.append({key: one.cpu().clone() for key, one in seen.items()})

    def _see_losses(
        self,
        _: object,
        losses: Tensor,
        head: object,
        logits: object,
        labels: Tensor,
        *,
        slope: bool,
    ) -> None:
        self._losses[slope].append((labels.cpu().clone(), losses.detach().cpu().clone()))

    def _hook(self, name: str, module: nn.Module) -> None:
        @torch.no_grad()
        def see(module: nn.Module, inputs: object, output: object) -> None:
            if isinstance(output, Tensor) and output.ndim == 3 and output.is_floating_point():
                local = local_part(output.detach()).double()
                seen = torch.stack([local.norm(dim=-1), local.abs().amax(-1)], -1)
                self._outputs[name].append(seen.cpu())
                self._widths[name] = local.shape[-1]

        self._undo.callback(module.register_forward_hook(see).remove)

    @torch.no_grad()
    def _see_parameters(self, *, of_gradients: bool) -> dict[str, Tensor]:
        """Return the share of each parameter or gradient: square sum and largest element."""
        found = {}
        for name, p in self._run.model.named_parameters():
            tensor = p.grad if of_gradients else p
            if tensor is None:
                continue
            local = local_part(tensor.detach()).double()
            largest = local.abs().max() if local.numel() else local.new_zeros(())
            shares = [local.square().sum() / num_copies(tensor), largest]
            found[name] = torch.stack(shares).cpu()
        return found

    def _record(self) -> Seen:
        mesh = self._run.mesh
        return {
            "rank": dist.get_rank(),
            "dp": (mesh.dp_rank, mesh.dims.dp),
            # of the ranks with the same losses, one reports them
            "reports_losses": self._run.execution.owns_loss and mesh.data.get_local_rank("tp") == 0,
            "batches": self._batches,
            "outputs": {name: torch.cat(seen) for name, seen in self._outputs.items()},
            "widths": self._widths,
            "weights": self._weights,
            "weight_gradients": self._weight_gradients,
            # if a backward pass computes the gradients later, it computes the losses again
            "losses": self._losses[False] or self._losses[True],
        }


def read_seen(folder: Path) -> list[Seen]:
    """Return the records of all ranks in a run's folder, in the order of ranks."""
    files = (folder / FOLDER).glob("rank_*.pt")
    found: list[Seen] = [torch.load(file, weights_only=True) for file in files]
    return sorted(found, key=lambda seen: int(seen["rank"]))


def places_of(seen: Seen) -> list[tuple[int, int]]:
    """Return sample and place of each token of a rank; the step's first sample is 0."""
    dp_rank, dp = seen["dp"]
    found = []
    for number, batch in enumerate(seen["batches"]):
        places = batch["places"]
        first = (number * dp + dp_rank) * len(places)
        found += [(first + i, place) for i, row in enumerate(places.tolist()) for place in row]
    return found


def columns(seen: Seen, key: str) -> Tensor:
    """Return `key` of all tokens of a rank, (T)."""
    return torch.cat([batch[key].flatten() for batch in seen["batches"]])
