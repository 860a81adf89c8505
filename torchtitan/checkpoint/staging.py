"""A copy of the state in host memory, from which a save can go on while training changes it.

Training waits for this copy alone. On a CPU most of its time would go to the system handing out new
pages, several times that of the copying itself, so the memory is taken once and kept for every
later save: only the first one of a run pays for it."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor
from torch.distributed.tensor import DTensor

from torchtitan.checkpoint.storage import Component


class Staging:
    """Host memory for one copy of the state; the next copy overwrites it."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, str], Tensor] = {}

    def copy(self, components: Mapping[str, Component]) -> dict[str, Component]:
        """Return the components with all tensors copied; the copy before must be done with."""
        return {
            name: Component(
                tensors={key: self._copy((name, key), t) for key, t in component.tensors.items()},
                state=component.state,
            )
            for name, component in components.items()
        }

    def _copy(self, key: tuple[str, str], tensor: Tensor) -> Tensor:
        source = tensor.detach()
        buffer = self._buffers.get(key)
        if buffer is None or not _alike(buffer, source):
            self._buffers[key] = source.to("cpu", copy=True)
        else:
            _local(buffer).copy_(_local(source))
        return self._buffers[key]


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and _local(a).shape == _local(b).shape


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
