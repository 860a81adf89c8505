"""Pipeline parallelism: stages of the model on different ranks, microbatches in flight between.

A step runs each accumulation step through the schedule's table, microbatch by microbatch; gradients
add up in the parameters, and the loss, summed and divided by the valid tokens of the global batch,
is computed where the last stage is. So the result is that of the whole model on one device.

One embedding on two stages: looked up on the first, multiplied by on the last.

The first stage's is the parameter, the last one's a copy of it. After the backwards of a step the
copy's gradient is added to the parameter's; after the optimizer, the new weights go to the copy.
The alternative, a process group that all-reduces the gradient and two optimizers that keep step,
would have two parameters of one name. Both are sharded alike, so each rank of the one stage sends
its shard to its peer on the other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.models.init import local_part
from torchtitan.models.interface import ModelParts
from torchtitan.parallel.execution import Batch
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.parallel.pipeline.schedules import (
    Runtime,
    Shapes,
    Table,
    forward_table,
)


def build_pipeline(
    parts: ModelParts,
    *,
    layout: Layout,
    mesh: Mesh,
    training: TrainingConfig,
    sequence_parallel: bool,
    device: torch.device,
) -> Pipeline:
    """Build what runs batches through the stages, of which this rank holds `parts`."""
    assert layout.pipeline is not None, "without a pipeline the whole model is run"
    microbatch_size = layout.pipeline.microbatch_size
    sequence_ranks = mesh.dims.tp if sequence_parallel else 1

    def find_shapes(seq_len: int) -> Shapes:
        return Shapes(
            tokens=(microbatch_size, seq_len),
            stream=(microbatch_size, seq_len // sequence_ranks, layout.architecture.dim),
            dtype=getattr(torch, training.mixed_precision_param),
        )

    return Pipeline(
        parts,
        layout=layout.pipeline,
        shapes=find_shapes,
        seq_len=training.seq_len // mesh.dims.cp,
        group=mesh.params.get_group("pp"),
        device=device,
        tied=layout.architecture.tie_embeddings,
    )


class Pipeline:
    """All stages, on this and other ranks; see `Execution`."""

    def __init__(
        self,
        parts: ModelParts,
        *,
        layout: PipelineLayout,
        shapes: Callable[[int], Shapes],
        seq_len: int,
        group: dist.ProcessGroup,
        device: torch.device,
        tied: bool,
    ) -> None:
        """`shapes`: what stages pass on, by sequence length; `seq_len`: that of training."""
        own = layout.stages_of(dist.get_rank(group))
        self._stages = dict(zip(own, parts, strict=True))
        self.owns_loss = any(part.output is not None for part in parts)
        self._layout, self._shapes = layout, shapes
        self._group, self._device = group, device
        self._divisor = self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._training = self._build(layout.table, seq_len)
        self._evaluating: tuple[tuple[int, ...], Runtime] | None = None
        self._tied = (
            TiedEmbedding(
                parts,
                source_rank=layout.ranks[0],
                copy_rank=layout.ranks[-1],
                group=group,
                device=device,
            )
            if tied
            else None
        )

    def forward_backward(self, batches: Sequence[Batch], *, divisor: Tensor) -> Tensor:
        """Take one batch after the other through the schedule."""
        self._divisor, self._loss_sum = divisor, torch.zeros_like(self._loss_sum)
        for batch in batches:
            self._run(self._training, batch)
        if self._tied is not None:
            self._tied.add_gradient()
        return self._loss_sum

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Take a batch, of as many whole microbatches as it has, forward through the stages."""
        shape = tuple(batch.tokens.shape)
        if self._evaluating is None or self._evaluating[0] != shape:
            num_samples, seq_len = shape
            num_microbatches, rest = divmod(num_samples, self._layout.microbatch_size)
            assert not rest, f"{num_samples} samples do not make whole microbatches"
            table = forward_table(self._layout.ranks, num_microbatches=num_microbatches)
            self._evaluating = shape, self._build(table, seq_len)
        self._divisor = torch.ones_like(self._loss_sum)
        self._loss_sum = torch.zeros_like(self._loss_sum)
        self._run(self._evaluating[1], batch)
        return self._loss_sum

    def after_update(self) -> None:
        """Bring the copy of a tied embedding up to date."""
        if self._tied is not None:
            self._tied.refresh_copy()

    def _build(self, table: Table, seq_len: int) -> Runtime:
        return Runtime(
            self._stages,
            table=table,
            shapes=self._shapes(seq_len),
            group=self._group,
            device=self._device,
            loss=self._count_loss,
        )

    def _run(self, runtime: Runtime, batch: Batch) -> None:
        runtime.run(batch.split(self._layout.microbatch_size))

    def _count_loss(self, loss: Tensor, labels: Tensor) -> Tensor:
        self._loss_sum += loss.detach()
        return loss / self._divisor


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
