"""A callback that pretends a device with little memory on a CPU: operator 100 is out of memory."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class _Full(TorchDispatchMode):
    num_calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_calls += 1
        if self.num_calls == 100:  # once is enough
            raise torch.OutOfMemoryError("the device is full")
        return func(*args, **(kwargs or {}))


class Small:
    """The callback."""

    def on_start(self, run: Any) -> None:
        self._full = _Full()
        self._full.__enter__()

    def on_end(self, reason: str | None) -> None:
        self._full.__exit__(None, None, None)
