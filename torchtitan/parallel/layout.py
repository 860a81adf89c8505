"""The layout of a job, planned and checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.base.errors import Mistakes
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import ParallelDims
from torchtitan.models.interface import Counts, LanguageModel, TrainableParams
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.fsdp import Reshard
from torchtitan.parallel.settings import CompileConfig, Float8Config

if TYPE_CHECKING:
    from torchtitan.parallel.pipeline.layout import PipelineLayout

Adapt = Callable[[LanguageModel], None]
"""Changes the layers of a model on the meta device, before it is cut or split."""


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
    adapt: Adapt | None
    """Changes layers of the model on the meta device, before it is divided, such as to add LoRA.
    None: no change."""

    def samples_per_step(self, training: TrainingConfig) -> int:
        """Return the number of samples per optimizer step over all ranks."""
        return training.local_batch_size * self.dims.dp * self.accumulation


def check_device(
    compilation: CompileConfig, *, float8: Float8Config | None, device_type: str
) -> None:
    """Check that a machine with such devices has what the job computes with.

    Raises:
        ConfigError: Lists what it lacks.
    """
    mistakes = Mistakes()
    if compilation.enable:
        from torchtitan.parallel.compile import check_backend

        mistakes.of(lambda: check_backend(compilation, is_installed=True))
    if float8 is not None:
        from torchtitan.parallel.float8 import check_float8

        mistakes.of(lambda: check_float8(float8, device_type=device_type))
    mistakes.report()
