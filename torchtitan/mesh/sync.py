"""Flags that ranks exchange in each step, so that all of them act alike.

No rank may stop, or report a failed save, on its own: the other ranks would wait for it in their
next collective. So flags travel with the valid-token counts in the one reduction at the start of a
step, and all ranks read the same sums at the end of the step.

The gradient norm is the same on all ranks too, but reading it at once would make the host wait for
the device. So the norm of a step is checked while the device works on the next step, or earlier if
a caller needs to know (`check_pending_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.device import HostCopy, to_device
from torchtitan.mesh.faults import raise_if_nonfinite
from torchtitan.mesh.stop import StopRequest, stop_reason


class StepSync:
    """Exchanges the flags of all ranks.

    `callback_stops` returns whether a callback asks to stop, `failures` whether something failed on
    this rank, e.g. a background save. `equal_ranks` have the same tokens.
    """

    def __init__(
        self,
        stop: StopRequest,
        *,
        callback_stops: Callable[[], bool] = lambda: False,
        failures: Sequence[Callable[[], bool]],
        equal_ranks: int,
        device: torch.device,
    ) -> None:
        self.stopped: str | None = None
        """Why the run stops early, the same on all ranks. None if it does not."""
        self._stop, self._callback_stops, self._failures = stop, callback_stops, failures
        self._equal_ranks, self._device = equal_ranks, device
        self._flags: HostCopy | None = None
        self._unchecked: tuple[HostCopy, Tensor, int] | None = None

    def sum_valid(self, num_valid: Tensor) -> Tensor:
        """Return the numbers of valid tokens in the global batch; exchange flags with them."""
        failed = [int(has_failed()) for has_failed in self._failures]
        flags = to_device([*failed, *self._votes()], num_valid.device)
        sums = torch.cat([num_valid.flatten(), flags])
        dist.all_reduce(sums)
        self._flags = HostCopy(sums[num_valid.numel() :])
        return sums[: num_valid.numel()].view_as(num_valid) // self._equal_ranks

    def read_flags(self) -> list[bool]:
        """Read the flags exchanged in this step: set `stopped`, return whether any rank has each of
        the failures."""
        assert self._flags is not None, "call sum_valid first"
        flags = [int(flag) for flag in self._flags.read()]
        self.stopped = self.stopped or stop_reason(flags[len(self._failures) :])
        return [flag > 0 for flag in flags[: len(self._failures)]]

    def is_stopped(self) -> bool:
        """Exchange the requests to stop again, in what may take longer than a step; return whether
        the run stops."""
        if self.stopped is None:
            votes = to_device(self._votes(), self._device)
            dist.all_reduce(votes)
            self.stopped = stop_reason(votes.tolist())
        return self.stopped is not None

    def stop_alone(self) -> None:
        """Stop the only rank, which was asked to."""
        self.stopped = stop_reason(self._votes())

    def _votes(self) -> list[int]:
        return [*self._stop.votes(), int(self._callback_stops())]

    def defer_norm_check(self, norm: Tensor, *, loss: Tensor, step: int) -> None:
        """Store the gradient norm of a step and this rank's loss for `check_pending_norm`."""
        self._unchecked = HostCopy(norm.reshape(1)), loss, step

    def check_pending_norm(self) -> None:
        """Check the stored norm, if any; raise NonFiniteError if the norm is not finite."""
        if self._unchecked is None:
            return
        (on_host, loss, step), self._unchecked = self._unchecked, None
        [norm] = on_host.read()
        raise_if_nonfinite(norm, loss=loss, step=step)
