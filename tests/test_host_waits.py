"""The host never waits for the device within a step, and once in a step that is logged.

The host waits where it needs a number from the device: `.item()`, `float()`, `if`, `.tolist()`, and
operators whose output shape depends on values. Real steps of a small model on the CPU show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from scripts.benchmarks.ranks import run_ranks
from scripts.benchmarks.turns import build_job
from torchtitan import trainer
from torchtitan.base.device import HostCopy
from torchtitan.data.loader import Loader
from torchtitan.mesh.ranks import RankInfo
from torchtitan.optim.clip import clip_gradients
from torchtitan.trainer import Trainer

SYNCING = frozenset(
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
COPIES = ("tolist", "numpy", "cpu")
"""Methods that copy to the host, which are not operators for tensors on the CPU."""
LOGGED = 10
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


class Waits(TorchDispatchMode):
    """Counts the waits of the host and the copies that it reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits, self.num_read_later = 0, 0
        self._is_paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        by_mask = name == "aten::index.Tensor" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.num_waits += (name in SYNCING or by_mask) and not self._is_paused
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    @contextmanager
    def counting(self) -> Iterator[None]:
        def counted(copy: Callable[..., Any]) -> Callable[..., Any]:
            def work(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
                self.num_waits += not self._is_paused
                return copy(tensor, *args, **kwargs)

            return work

        read = HostCopy.read

        def read_later(copy: HostCopy) -> list[float]:
            self.num_read_later += 1
            with self.paused():
                return read(copy)

        with ExitStack() as stack:
            for name in COPIES:
                stack.enter_context(patch.object(Tensor, name, counted(getattr(Tensor, name))))
            stack.enter_context(patch.object(HostCopy, "read", read_later))
            stack.enter_context(self)
            yield


def count_waits(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Return (waits, copies read later) of a step and of a logged step."""
    run, waits, seen = build_job(settings, launch=launch, folder=folder), Waits(), [(0, 0)]
    take = Loader.__next__

    def taken(loader: Loader) -> Any:
        with waits.paused():  # batches are still on the host
            return take(loader)

    def note(step: int) -> None:
        seen.append((waits.num_waits, waits.num_read_later))

    with patch.object(Loader, "__next__", taken), waits.counting():
        Trainer(run).train(on_step=note)
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(seen)]
    return {"step": steps[LOGGED - 2], "logged": steps[LOGGED - 1]}


def count_planted(launch: RankInfo, folder: Path, settings: dict[str, Any]) -> dict[str, Any]:
    """Count with a wait in the clipping of gradients."""

    def clip(parameters: Any, *, norm: Tensor, max_norm: float) -> None:
        norm.item()
        clip_gradients(parameters, norm=norm, max_norm=max_norm)

    with patch.object(trainer, "clip_gradients", clip):
        return count_waits(launch, folder, settings)


@pytest.mark.promise("no-waits")
def test_a_step_never_waits() -> None:
    found = run_ranks(count_waits, SETTINGS, ranks=1)
    assert found["step"] == [0, 2]
    assert found["logged"][0] == 1
    assert run_ranks(count_planted, SETTINGS, ranks=1)["step"] == [1, 2]
