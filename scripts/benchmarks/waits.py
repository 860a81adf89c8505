"""How often the host waits for the device in a step, counted in real steps of a small model.

The host waits where it asks for a number that the device computes: `.item()`, `float()`, `if`,
`.tolist()`, and operators whose result's shape depends on contents. Then all that was launched must
be done, and the device idles until the host has launched more. It does not depend on sizes, so a
few steps on this machine's CPU tell; only what is done with batches before they are on the device
is left out of the count.

A copy that is asked for and read later (`torchtitan.base.device`) does not stop the device; it is
counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from scripts.benchmarks.turns import OURS, assemble_ours, build_other, load_batches
from torchtitan.base.device import HostCopy, local_device
from torchtitan.data.loader import Loader
from torchtitan.mesh.ranks import RankInfo
from torchtitan.tools.plan.tape import DispatchMode
from torchtitan.trainer import Trainer

ASKS = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::equal",
        "aten::nonzero",
        "aten::masked_select",
        "aten::_unique2",
        "aten::unique_dim",
        "aten::repeat_interleave.Tensor",
    }
)
"""Operators of which the host gets a number, or the shape of a result."""
COPIES = ("tolist", "numpy", "cpu")
"""Methods that copy to the host, and are no operators where a tensor is there already."""
LOGGED = 10
"""The step of these few that is reported."""
SETTINGS: dict[str, Any] = {
    "model": "llama3",
    "flavor": "tiny",
    "tokenizer": "byte",
    "dtype": "bfloat16",
    "recompute": "none",
    "compile": False,
    "batch": 2,
    "seq_len": 16,
    "steps": LOGGED,
    "pairs": 1,
    "ranks": 1,
}
"""Of a job that waits as often as a large one."""


class Waits(DispatchMode):
    """Counts, while it is entered, where the host waits, and what it reads of copies."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits, self.num_read_later = 0, 0
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ASKS or (name == "aten::index.Tensor" and _by_mask(args[1])):
            self._count()
        return func(*args, **(kwargs or {}))

    def _count(self) -> None:
        self.num_waits += not self._is_paused

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count operators, copies and what is read later."""

        def copied(copy: Callable[..., Any]) -> Callable[..., Any]:
            def work(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self._count()
                return copy(tensor, *args, **kwargs)

            return work

        read = HostCopy.read

        def read_later(copy: HostCopy) -> list[float]:
            self.num_read_later += 1
            with self.paused():
                return read(copy)

        with ExitStack() as stack:
            for name in COPIES:
                value = copied(getattr(Tensor, name))
                stack.enter_context(patch.object(Tensor, name, value))
            stack.enter_context(patch.object(HostCopy, "read", read_later))
            stack.enter_context(self)
            yield


def _by_mask(indices: Any) -> bool:
    return any(index is not None and index.dtype == torch.bool for index in indices)


def count_waits(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Count in steps of the loop `settings["loop"]`: in one, and in one that is reported."""
    waits, seen = Waits(), [(0, 0)]

    def note(step: int) -> None:
        seen.append((waits.num_waits, waits.num_read_later))

    if settings["loop"] == OURS:
        run = assemble_ours(settings, launch=launch, folder=folder)
        take = Loader.__next__

        def taken(loader: Loader) -> Any:
            with waits.paused():  # batches are with the host still
                return take(loader)

        with patch.object(Loader, "__next__", taken), waits.counting():
            Trainer(run).train(on_step=note)
    else:
        device = local_device(launch.local_rank)
        batches = load_batches(settings, device=device, folder=folder)
        loop = build_other(
            settings["loop"], settings, device=device, batches=batches, folder=folder
        )
        with waits.counting():
            for step in range(LOGGED + 1):
                loop.run(1)
                note(step)
    steps = [
        {"waits": after[0] - before[0], "read later": after[1] - before[1]}
        for before, after in pairwise(seen)
    ]
    # the first and the last differ
    return {"step": steps[LOGGED - 2], "reported": steps[LOGGED - 1]}
