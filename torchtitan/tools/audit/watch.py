"""A callback that watches one step on every rank, from inside and without changing it.

What each rank has seen it writes into `seen/rank_R.pt` of its folder; who started the ranks puts
the parts together.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

from torchtitan.trainer import Run

STEP = "TORCHTITAN_WATCHED_STEP"
FOLDER = "seen"
MOST_DOTS = 2
"""Of a module's name: a layer, its norms, attention and feed-forward, and nothing inside these."""


class Watch(ABC):
    """Watches the step that the environment names."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._file, self._rank = folder / FOLDER / f"rank_{rank}.pt", rank
        self._step = int(os.environ[STEP])
        self.run: Run
        self.batches: list[dict[str, Tensor]] = []
        """This rank's part of each microbatch: tokens, labels and their places in the sample."""
        self._open = ExitStack()

    def on_start(self, run: Run) -> None:
        """Begin at once, if it is the first step."""
        self.run = run
        self._begin_behind(run.progress.step)

    def on_step(self, step: int, row: Mapping[str, object] | None) -> None:
        """Begin behind the step before, and write behind the step itself."""
        self._begin_behind(step)
        if step == self._step:
            self._open.close()
            self._file.parent.mkdir(parents=True, exist_ok=True)
            torch.save(self.seen(), self._file)

    @abstractmethod
    def begin(self) -> None:
        """Begin to watch: the next step is the one."""

    @abstractmethod
    def see_gradients(self) -> None:
        """Look at the gradients, right before the update."""

    @abstractmethod
    def seen(self) -> dict[str, Any]:
        """Return what this rank has seen."""

    def _begin_behind(self, step: int) -> None:
        if step + 1 != self._step:
            return
        self.replace(self.run.sequence_shard, "take", self._see_batch)
        hook = self.run.optimizer.register_step_pre_hook(lambda *update: self.see_gradients())
        self._open.callback(hook.remove)
        self.begin()

    def hook_modules(self, see: Callable[[str, object], None]) -> None:
        """Call `see` with the name and the output of each module."""
        for name, module in self._modules():

            def hook(module: nn.Module, inputs: object, output: object, name: str = name) -> None:
                see(name, output)

            self._open.callback(module.register_forward_hook(hook).remove)

    def _modules(self) -> Iterator[tuple[str, nn.Module]]:
        for part in self.run.model:
            for name, module in part.named_modules():
                if name and name.count(".") <= MOST_DOTS:
                    yield name, module

    def replace(self, owner: Any, name: str, see: Callable[..., None]) -> None:
        """Have `see` called with the original, the result and the arguments of each call."""
        original = getattr(owner, name)

        def watched(*arguments: Any, **named: Any) -> Any:
            result = original(*arguments, **named)
            see(original, result, *arguments, **named)
            return result

        self._open.enter_context(patch.object(owner, name, watched))

    def _see_batch(self, take: Callable[..., Any], batch: Any, samples: Mapping[str, Any]) -> None:
        places = torch.arange(samples["tokens"].shape[1]).expand_as(samples["tokens"])
        taken = take({**samples, "tokens": places}).tokens
        kept = {"tokens": batch.tokens, "labels": batch.labels, "places": taken}
        self.batches.append({key: one.cpu().clone() for key, one in kept.items()})


def columns(batches: Iterable[Mapping[str, Tensor]], key: str) -> Tensor:
    """Return what a rank's microbatches have of `key`, token after token."""
    return torch.cat([batch[key].flatten() for batch in batches])
