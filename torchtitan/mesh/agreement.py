"""What the ranks tell each other in a step, so that all of them act alike.

No rank may stop, or report a failed save, on its own: the others would wait for it in their next
collective. So flags travel with the valid tokens in the one reduction that every step begins with,
and all ranks read the same sums at the end of that step.

Whether the gradient norm is finite is known to all ranks alike too, but reading it at once would
make the host wait for the device. So the norm of a step is checked while the device works on the
next one; whoever needs to know before asks for it (`check_pending_norm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.transfer import HostCopy, to_device
from torchtitan.mesh.faults import raise_if_nonfinite
from torchtitan.mesh.stop import StopRequest, describe


class Agreement:
    """Exchanges this rank's flags with all others, and holds what they agreed on.

    `failures` tell what has failed on this rank since: a save in the background, a callback.
    `equal_ranks` is the number of ranks that hold the same tokens.
    """

    def __init__(
        self,
        stop: StopRequest,
        *,
        failures: Sequence[Callable[[], bool]],
        equal_ranks: int,
        device: torch.device,
    ) -> None:
        self.stopped: str | None = None
        """Why the run stops before its end, the same on all ranks; None: it does not."""
        self._stop, self._failures = stop, failures
        self._equal_ranks, self._device = equal_ranks, device
        self._flags: HostCopy | None = None
        self._unchecked: tuple[HostCopy, Tensor, int] | None = None

    def sum_valid(self, num_valid: Tensor) -> Tensor:
        """Return the valid tokens of the global batch, and exchange flags in the same reduction."""
        failed = [int(has_failed()) for has_failed in self._failures]
        flags = to_device([*failed, *self._stop.votes()], num_valid.device)
        sums = torch.cat([num_valid.reshape(1), flags])
        dist.all_reduce(sums)
        self._flags = HostCopy(sums[1:])
        return sums[0] // self._equal_ranks

    def read_flags(self) -> list[bool]:
        """Read the flags all ranks exchanged at the start of this step: set `stopped`, and return
        which of the failures any rank has."""
        assert self._flags is not None, "sum_valid comes first"
        flags = [int(flag) for flag in self._flags.read()]
        self.stopped = self.stopped or describe(flags[len(self._failures) :])
        return [flag > 0 for flag in flags[: len(self._failures)]]

    def vote_again(self) -> None:
        """Exchange the votes to stop once more, after a save: it may have taken long."""
        if self.stopped is None:
            votes = to_device(self._stop.votes(), self._device)
            dist.all_reduce(votes)
            self.stopped = describe(votes.tolist())

    def add_norm(self, norm: Tensor, *, loss: Tensor, step: int) -> None:
        """Take a step's gradient norm, the same on all ranks, and this rank's loss, to check."""
        self._unchecked = HostCopy(norm.reshape(1)), loss, step

    def check_pending_norm(self) -> None:
        """Check the last norm, if that was not done yet.

        Raises:
            NonFiniteError: It is not finite.
        """
        if self._unchecked is None:
            return
        (on_host, loss, step), self._unchecked = self._unchecked, None
        [norm] = on_host.read()
        raise_if_nonfinite(norm, loss=loss, step=step)
