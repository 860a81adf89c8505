"""The layout of a job: everything about its ranks and model that is known before it is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import ParallelDims
from torchtitan.models.interface import Counts, LanguageModel, TrainableParams
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.fsdp import Reshard
from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.parallel.settings import Float8Config


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A model and its division over the ranks."""

    spec: ModelSpec
    architecture: DecoderConfig
    counts: Counts
    dims: ParallelDims
    reshard: Reshard
    pipeline: PipelineLayout | None
    """Stages and schedule. None without pipeline parallelism."""
    float8: Float8Config | None
    """Settings of float8 linear layers. None: no layer uses float8."""
    accumulation: int
    """Number of batches of local_batch_size samples that a rank accumulates per step."""
    trained: TrainableParams
    """Selects the parameters to train."""
    adapt: Callable[[LanguageModel], None] | None
    """Changes layers of the model on the meta device, before it is divided, such as to add LoRA.
    None: no change."""

    def samples_per_step(self, training: TrainingConfig) -> int:
        """Return the number of samples per optimizer step over all ranks."""
        return training.local_batch_size * self.dims.dp * self.accumulation
