"""Pipeline parallelism: stages of the model on different ranks, and microbatches in flight.

Each batch of a step runs through the schedule's table, microbatch by microbatch. Gradients are
summed in the parameters. The last stage computes the loss, summed and divided by the valid tokens
of the global batch, so the result equals the full model on one device.

**Tied embeddings.** The first stage looks up rows of the embedding, and the last stage multiplies
by it. The first stage owns the parameter, and the last one has a copy. After the backwards of a
step the copy's gradient is added to the parameter's, and after the optimizer the new weights are
sent to the copy. The alternative, a process group that all-reduces the gradient and two optimizers
that stay in step, would have two parameters with one name. Both are sharded in the same way, so
each rank of one stage sends its shard to its peer of the other stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.models.init import local_part
from torchtitan.models.interface import ModelParts
from torchtitan.parallel.execution import Batch
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline.schedules import Runtime, Shapes, Table, forward_table


class Pipeline:
    """Execution by all stages, on this rank and others. See `Execution`."""

    def __init__(
        self,
        parts: ModelParts,
        *,
        layout: Layout,
        mesh: Mesh,
        training: TrainingConfig,
        sequence_parallel: bool,
        device: torch.device,
    ) -> None:
        assert layout.pipeline is not None, "a job without a pipeline uses WholeModel"
        self._layout, self._device = layout.pipeline, device
        self._group = mesh.params.get_group("pp")
        self._stream_dim = layout.architecture.dim
        self._stream_dtype = getattr(torch, training.mixed_precision_param)
        self._sequence_ranks = mesh.dims.tp if sequence_parallel else 1
        own = layout.pipeline.stages_of(dist.get_rank(self._group))
        self._stages = dict(zip(own, parts, strict=True))
        self.owns_loss = any(part.output is not None for part in parts)
        self._divisor = self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._training = self._build(layout.pipeline.table, training.seq_len // mesh.dims.cp)
        self._evaluations: dict[tuple[int, ...], Runtime] = {}
        self._tied: TiedEmbedding | None = None
        if layout.architecture.tie_embeddings:
            self._tied = TiedEmbedding(
                source=parts.tied_source,
                copy=parts.tied_copy,
                source_rank=layout.pipeline.ranks[0],
                copy_rank=layout.pipeline.ranks[-1],
                group=self._group,
                device=device,
            )

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Run the batches in order through the schedule."""
        self._divisor, self._loss_sum = divisor, torch.zeros_like(self._loss_sum)
        for batch in batches:
            self._training.run(batch.split(self._layout.microbatch_size))
        if self._tied is not None:
            self._tied.add_gradient()
        return self._loss_sum

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Run a batch of any number of microbatches forward through the stages."""
        num_samples, seq_len = shape = tuple(batch.tokens.shape)
        if shape not in self._evaluations:
            if len(self._evaluations) == 2:  # each holds receive buffers
                self._evaluations.pop(next(iter(self._evaluations)))
            num_microbatches, remainder = divmod(num_samples, self._layout.microbatch_size)
            assert not remainder, f"{num_samples} samples are not a multiple of a microbatch"
            table = forward_table(self._layout.ranks, num_microbatches=num_microbatches)
            self._evaluations[shape] = self._build(table, seq_len)
        self._divisor = torch.ones_like(self._loss_sum)
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._evaluations[shape].run(batch.split(self._layout.microbatch_size))
        return self._loss_sum

    def after_update(self) -> None:
        """Update the copy of a tied embedding."""
        if self._tied is not None:
            self._tied.refresh_copy()

    def _build(self, table: Table, seq_len: int) -> Runtime:
        size = self._layout.microbatch_size
        shapes = Shapes(
            tokens=(size, seq_len),
            stream=(size, seq_len // self._sequence_ranks, self._stream_dim),
            dtype=self._stream_dtype,
        )
        return Runtime(
            self._stages,
            table=table,
            shapes=shapes,
            group=self._group,
            device=self._device,
            loss=self._add_loss,
        )

    def _add_loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        self._loss_sum += loss.detach()
        return loss / self._divisor


@dataclass(frozen=True)
class TiedEmbedding:
    """A tied embedding and its copy. A rank may have either, both or neither.

    `source_rank` and `copy_rank` are the ranks of the two in `group`, the pp axis.
    """

    source: nn.Parameter | None
    copy: nn.Parameter | None
    source_rank: int
    copy_rank: int
    group: dist.ProcessGroup
    device: torch.device

    @torch.no_grad()
    def add_gradient(self) -> None:
        """Add the copy's gradient to the parameter's, and clear it. Frozen ones have none."""
        if not all(end.requires_grad for end in (self.source, self.copy) if end is not None):
            return
        copy_grad = None
        if self.copy is not None:
            copy_grad = _local(self.copy.grad)
            self.copy.grad = None
        grad = _local(self.source.grad) if self.source is not None else None
        received = self._transfer(copy_grad, like=grad, src=self.copy_rank, dst=self.source_rank)
        if grad is not None and received is not None:
            grad.add_(received)

    @torch.no_grad()
    def refresh_copy(self) -> None:
        """Copy the parameter's weights to the copy."""
        source = _local(self.source) if self.source is not None else None
        copy = _local(self.copy) if self.copy is not None else None
        received = self._transfer(source, like=copy, src=self.source_rank, dst=self.copy_rank)
        if copy is not None and received is not None:
            copy.copy_(received)

    def _transfer(
        self, sent: Tensor | None, *, like: Tensor | None, src: int, dst: int
    ) -> Tensor | None:
        """Send a tensor from rank `src` to `dst`, which has one `like` it. Return it there."""
        if src == dst:
            return sent
        if sent is not None and sent.numel():
            dist.send(sent.to(self.device).contiguous(), group=self.group, group_dst=dst)
        if like is None or not like.numel():
            return None
        received = torch.empty_like(like, device=self.device)
        dist.recv(received, group=self.group, group_src=src)
        return received.to(like.device)


def _local(tensor: Tensor | None) -> Tensor:
    assert tensor is not None, "every backward leaves a gradient of a tied embedding"
    return local_part(tensor)
