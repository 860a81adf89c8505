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

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from torchtitan import trainer
from torchtitan.base.device import HostCopy
from torchtitan.data.loader import Loader
from torchtitan.optim.clip import clip_gradients
from torchtitan.trainer import Trainer

SYNCING = frozenset(
    f"aten::{name}"
    for name in (
        *("_local_scalar_dense", "equal", "nonzero", "masked_select", "_unique2", "unique_dim"),
        "repeat_interleave.Tensor",
    )
)
COPIES = ("tolist", "numpy", "cpu")
"""Methods that copy to the host, which are not operators for tensors on the CPU."""
LOGGED = 10


class Waits(TorchDispatchMode):
    """Counts the waits of the host, and the copies that it reads later."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits, self.num_read_later = 0, 0
        self._pauses = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        by_mask = func.name() == "aten::index.Tensor" and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        self.num_waits += (func.name() in SYNCING or by_mask) and not self._pauses
        return func(*args, **(kwargs or {}))

    @contextmanager
    def counting(self) -> Iterator[None]:
        """Count, and let the host read what it copied earlier; batches are still on the host."""
        with ExitStack() as stack:
            for name in COPIES:
                copy = self.counted(getattr(Tensor, name))
                stack.enter_context(patch.object(Tensor, name, copy))
            for owner, name in ((HostCopy, "read"), (Loader, "__next__")):
                work = self.uncounted(getattr(owner, name))
                stack.enter_context(patch.object(owner, name, work))
            stack.enter_context(self)
            yield

    def counted(self, copy: Callable[..., Any]) -> Callable[..., Any]:
        def work(*args: Any, **kwargs: Any) -> Any:
            self.num_waits += not self._pauses
            return copy(*args, **kwargs)

        return work

    def uncounted(self, work: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            self._pauses += 1
            self.num_read_later += work is READ
            try:
                return work(*args)
            finally:
                self._pauses -= 1

        return call


READ = HostCopy.read


def waiting_clip(parameters: Any, *, norm: Tensor, max_norm: float) -> None:
    norm.item()
    clip_gradients(parameters, norm=norm, max_norm=max_norm)


def count_waits(job: list[str], *, plants: bool) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return (waits, copies read later) of a step and of a logged step."""
    run, waits, seen = jobs.start(job), Waits(), [(0, 0)]
    clip = waiting_clip if plants else clip_gradients
    with patch.object(trainer, "clip_gradients", clip), waits.counting():
        Trainer(run).train(
            on_step=lambda step: seen.append((waits.num_waits, waits.num_read_later))
        )
    steps = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(seen)]
    return steps[LOGGED - 2], steps[LOGGED - 1]


@pytest.mark.promise("no-waits")
@pytest.mark.slow(gate=["1"])
@pytest.mark.parametrize("world", [1, 2])
def test_a_step_never_waits(world: int, ranks: RankPool, tmp_path: Path) -> None:
    job = [*jobs.write_job(tmp_path), UNSAVED, f"--training.steps={LOGGED}"]
    job += [f"--metrics.log_freq={LOGGED}", "--training.mixed_precision_param=bfloat16"]
    for step, logged in ranks.run(count_waits, job, plants=False, world=world):
        assert step == (0, 2)
        assert logged[0] == 1
    for step, _ in ranks.run(count_waits, job, plants=True, world=world):
        assert step == (1, 2)
