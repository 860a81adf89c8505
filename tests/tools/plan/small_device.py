"""A callback that pretends a device with little memory on a CPU.

It counts the storages that a run makes after its start, so neither weights nor what there was
before, and is out of memory as a GPU is once more than SMALL_DEVICE bytes live at once.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Counted(TorchDispatchMode):
    def __init__(self, limit: float) -> None:
        super().__init__()
        self.limit, self.live = limit, 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(getattr(tensor, "_local_tensor", tensor).untyped_storage())
        if self.live > self.limit:
            self.limit = float("inf")  # once is enough
            raise torch.OutOfMemoryError(f"{self.live} bytes are live")
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.live += size
            weakref.finalize(storage, self._forget, key, size)

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


class Small:
    """The callback."""

    def on_start(self, run: Any) -> None:
        self._counted = _Counted(float(os.environ["SMALL_DEVICE"]))
        self._counted.__enter__()

    def on_end(self, reason: str | None) -> None:
        self._counted.__exit__(None, None, None)
