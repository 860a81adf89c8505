"""One embedding on two stages: looked up on the first, multiplied by on the last.

The first stage's is the parameter, the last one's a copy of it. After the backwards of a step the
copy's gradient is added to the parameter's; after the optimizer, the new weights go to the copy.
The alternative, a process group that all-reduces the gradient and two optimizers that keep step,
would have two parameters of one name. Both are sharded alike, so each rank of the one stage sends
its shard to its peer on the other.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.models.init import local_part
from torchtitan.models.parts import ModelParts


class TiedEmbedding:
    """The parameter and its copy, of which this rank may have either, both or neither."""

    def __init__(
        self,
        parts: ModelParts,
        *,
        source_rank: int,
        copy_rank: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        self._source = parts.tied_source
        self._copy = parts.tied_copy
        self._source_rank = source_rank
        self._copy_rank = copy_rank
        self._group = group
        self._device = device

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the copy's gradient to the parameter's, and forget it; frozen, they have none."""
        if not all(end.requires_grad for end in (self._source, self._copy) if end is not None):
            return
        theirs = None
        if self._copy is not None:
            theirs = _local(self._copy.grad)
            self._copy.grad = None
        ours = _local(self._source.grad) if self._source is not None else None
        received = self._pass_on(theirs, like=ours, start=self._copy_rank, end=self._source_rank)
        if ours is not None and received is not None:
            ours.add_(received)

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Give the copy the parameter's weights."""
        ours = _local(self._source) if self._source is not None else None
        theirs = _local(self._copy) if self._copy is not None else None
        received = self._pass_on(ours, like=theirs, start=self._source_rank, end=self._copy_rank)
        if theirs is not None and received is not None:
            theirs.copy_(received)

    def _pass_on(
        self, sent: Tensor | None, *, like: Tensor | None, start: int, end: int
    ) -> Tensor | None:
        """Send a tensor from one rank of the pipeline to another; return what arrived here."""
        if start == end:
            return sent
        if sent is not None and sent.numel():
            dist.send(sent.to(self._device).contiguous(), group=self._group, group_dst=end)
        if like is None or not like.numel():
            return None
        received = torch.empty_like(like, device=self._device)
        dist.recv(received, group=self._group, group_src=start)
        return received.to(like.device)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "every backward leaves a gradient of a tied embedding"
    return local_part(tensor)
