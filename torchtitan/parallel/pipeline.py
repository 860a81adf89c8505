"""Pipeline parallelism: stages of the model on different ranks, microbatches in flight between.

A step runs each accumulation step through the schedule's table, microbatch by microbatch; gradients
add up in the parameters, and the loss, summed and divided by the valid tokens of the global batch,
is computed where the last stage is. So the result is that of the whole model on one device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.config.schema import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchtitan.models.parts import ModelParts
from torchtitan.models.spec import DecoderConfig
from torchtitan.parallel.execution import Batch, LossFunction
from torchtitan.parallel.schedules import (
    SCHEDULES,
    Runtime,
    Shapes,
    Table,
    check_schedule,
    compute_table,
    forward_table,
    place_stages,
)
from torchtitan.parallel.stages import (
    Stages,
    check_modules,
    count_stages,
    cut,
    find_costs,
    name_modules,
)
from torchtitan.parallel.tied import TiedEmbedding


@dataclass(frozen=True, kw_only=True)
class PipelineLayout:
    """Which modules make up each stage, where each stage lies, and who does what when."""

    modules: Stages
    ranks: tuple[int, ...]
    """The rank of each stage, along the pipeline axis."""
    table: Table
    microbatch_size: int
    """Samples of a microbatch."""

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages that a rank holds, in their order."""
        return [stage for stage, holder in enumerate(self.ranks) if holder == rank]


def plan_pipeline(
    settings: ParallelismConfig,
    *,
    architecture: DecoderConfig,
    training: TrainingConfig,
    activation_checkpoint: ActivationCheckpointConfig,
) -> PipelineLayout:
    """Lay the model out over the pipeline; the same on every rank, and without building anything.

    Raises:
        ConfigError: Layers, stages, microbatches and schedule do not fit together.
    """
    pp, name = settings.pipeline_parallel_degree, settings.pipeline_parallel_schedule
    size = find_microbatch_size(settings, local_batch_size=training.local_batch_size)
    num_microbatches = training.local_batch_size // size
    num_stages = count_stages(
        settings,
        num_layers=architecture.num_layers,
        default_per_rank=2 if SCHEDULES[name].multi_stage else 1,
    )
    numbers = {"pp": pp, "stages_per_rank": num_stages // pp}
    check_schedule(name, num_microbatches=num_microbatches, **numbers)
    table = compute_table(name, num_microbatches=num_microbatches, **numbers)
    if settings.module_fqns_per_model_part:
        modules = check_modules(
            settings.module_fqns_per_model_part, num_layers=architecture.num_layers
        )
    else:
        costs = find_costs(settings, architecture=architecture, seq_len=training.seq_len)
        counts = cut(architecture.num_layers, num_stages=num_stages, costs=costs)
        modules = name_modules(counts)
    return PipelineLayout(
        modules=modules,
        ranks=place_stages(name, **numbers),
        table=table,
        microbatch_size=size,
    )


def find_microbatch_size(settings: ParallelismConfig, *, local_batch_size: int) -> int:
    """Return the samples of a microbatch."""
    number = settings.pipeline_parallel_num_microbatches
    if number is not None:
        return local_batch_size // number
    return settings.pipeline_parallel_microbatch_size


def find_shapes(
    architecture: DecoderConfig,
    seq_len: int,
    *,
    microbatch_size: int,
    settings: ParallelismConfig,
    tp: int,
    dtype: torch.dtype,
) -> Shapes:
    """Return what a rank passes on: its part of the sequence, and of the vocabulary, under tp."""
    seq_parallel = tp if settings.enable_sequence_parallel else 1
    loss_parallel = 1 if settings.disable_loss_parallel else tp
    return Shapes(
        tokens=(microbatch_size, seq_len),
        stream=(microbatch_size, seq_len // seq_parallel, architecture.dim),
        logits=(microbatch_size, seq_len, architecture.vocab_size // loss_parallel),
        dtype=dtype,
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
        loss: LossFunction,
        group: dist.ProcessGroup,
        device: torch.device,
        tied: bool,
    ) -> None:
        """`shapes` tells what travels for a sequence length, `seq_len` is that of training."""
        own = layout.stages_of(dist.get_rank(group))
        self._stages = dict(zip(own, parts, strict=True))
        self.owns_loss = any(part.output is not None for part in parts)
        self._layout, self._shapes = layout, shapes
        self._loss, self._group, self._device = loss, group, device
        self._divisor = self._loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self._training = self._build(layout.table, seq_len)
        self._evaluating: dict[tuple[int, ...], Runtime] = {}
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
        shape = tuple(batch["tokens"].shape)
        if shape not in self._evaluating:
            num_samples, seq_len = shape
            num_microbatches, rest = divmod(num_samples, self._layout.microbatch_size)
            assert not rest, f"{num_samples} samples do not make whole microbatches"
            table = forward_table(self._layout.ranks, num_microbatches=num_microbatches)
            self._evaluating[shape] = self._build(table, seq_len)
        self._divisor, self._loss_sum = torch.ones_like(self._loss_sum), self._loss_sum * 0
        self._run(self._evaluating[shape], batch)
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
        positions_S = torch.arange(batch["tokens"].shape[1], device=self._device)
        runtime.run(batch["tokens"], batch["labels"], positions_S)

    def _count_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        loss = self._loss(logits, labels)
        self._loss_sum += loss.detach()
        return loss / self._divisor
