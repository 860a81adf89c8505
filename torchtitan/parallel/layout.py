"""How a job lies over its ranks, as found before anything is built."""

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
    """A model and how it lies over the ranks."""

    spec: ModelSpec
    architecture: DecoderConfig
    counts: Counts
    dims: ParallelDims
    reshard: Reshard
    pipeline: PipelineLayout | None
    """Stages and schedule; None without pipeline parallelism."""
    float8: Float8Config | None
    """How linear layers compute in float8; None: they do not."""
    accumulation: int
    """Microbatches of local_batch_size samples that a rank accumulates in a step."""
    trained: TrainableParams
    """Which parameters are trained."""
    adapt: Callable[[LanguageModel], None] | None
    """Changes the layers of a model on the meta device, before it is cut or split; None: nothing
    does."""

    def samples_per_step(self, training: TrainingConfig) -> int:
        """Return the samples of one optimizer step over all ranks."""
        return training.local_batch_size * self.dims.dp * self.accumulation
