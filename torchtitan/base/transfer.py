"""Small numbers between host and device, without either waiting for the other.

`tensor.item()` makes the host wait until the device has done all that was asked of it, and then the
device waits for the host's next order. A copy into page-locked memory is one more order, and its
result may be read whenever it suits.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class HostCopy:
    """Numbers on their way to the host: asked for now, read later."""

    def __init__(self, values: Tensor) -> None:
        self._arrived: torch.cuda.Event | None = None
        if values.device.type == "cuda":
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._arrived = torch.cuda.Event()
            self._arrived.record()
        else:
            self._host = values.clone()

    def read(self) -> list[float]:
        """Return the numbers, once they are there."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()


def to_device(values: Sequence[int], device: torch.device) -> Tensor:
    """Send numbers to a device, int64."""
    pinned = torch.tensor(values, pin_memory=device.type == "cuda")
    return pinned.to(device, non_blocking=True)
