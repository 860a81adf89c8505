"""A copy of the state in host memory, from which a save can go on while training changes it.

Training waits for this copy alone. On a CPU most of its time would go to the system handing out new
pages, several times that of the copying itself, so the memory is taken once and kept for every
later save: only the first one of a run pays for it.

From a GPU the copy can go over the bus at full speed only into page-locked memory, which the driver
reads without the processor. That memory can never be swapped out, hence it is asked for by name
(`async_with_pinned_mem`)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from torchtitan.checkpoint.storage import Component
from torchtitan.models.init import local_part


class Staging:
    """Host memory for one copy of the state; the next copy overwrites it.

    `pinned`: page-locked for what lies on a GPU.
    """

    def __init__(self, *, pinned: bool = False) -> None:
        self._pinned = pinned
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, components: Mapping[str, Component]) -> dict[str, Component]:
        """Return the components with all tensors copied; the copy before must be done with."""
        copies = {
            name: Component(
                tensors=None
                if component.tensors is None
                else {key: self._copy((name, key), t) for key, t in component.tensors.items()},
                state=component.state,
            )
            for name, component in components.items()
        }
        if self._pinned:
            _finish_copies()  # they only began; the next step will change what they read
        return copies

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        source = tensor.detach()
        buffer = self._buffers.get(key)
        is_new = buffer is None or not _alike(buffer, source)
        if self._pinned and _is_on_gpu(source):
            if is_new:
                self._buffers[key] = _pinned_like(source)
            local_part(self._buffers[key]).copy_(local_part(source), non_blocking=True)
        elif is_new:
            self._buffers[key] = source.to("cpu", copy=True)
        else:
            local_part(self._buffers[key]).copy_(local_part(source))
        return self._buffers[key]


def _is_on_gpu(tensor: Tensor) -> bool:
    return local_part(tensor).is_cuda


def _pinned_like(tensor: Tensor) -> Tensor:
    # of a DTensor a DTensor: the options reach the local part, on whatever device the mesh is
    return torch.empty_like(tensor, device="cpu", pin_memory=True)


def _finish_copies() -> None:
    torch.cuda.current_stream().synchronize()


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and local_part(a).shape == local_part(b).shape
