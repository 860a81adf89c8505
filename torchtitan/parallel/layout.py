"""The layout of a job, planned and checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.base.errors import Mistakes
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import Counts, LanguageModel, TrainableParams
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.fsdp import Reshard, find_reshard
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


def check_parallel(
    model: LanguageModel,
    *,
    spec: ModelSpec,
    parallelism: ParallelismConfig,
    float8: Float8Config | None,
    compilation: CompileConfig,
) -> None:
    """Check that the full model, on the meta device, can be split by these degrees.

    Raises:
        ConfigError: Lists what cannot be.
    """
    mistakes = Mistakes()
    if compilation.enable:
        from torchtitan.parallel.compile import check_backend

        mistakes.of(lambda: check_backend(compilation, is_installed=False))
    if parallelism.tensor_parallel_degree > 1:
        from torchtitan.parallel.tensor import check_tensor_parallel

        mistakes.of(
            lambda: check_tensor_parallel(model, plan=spec.tensor_plan, parallelism=parallelism)
        )
    if parallelism.expert_parallel_degree > 1:
        from torchtitan.parallel.expert import check_expert_parallel

        mistakes.of(lambda: check_expert_parallel(model, parallelism=parallelism))
    if parallelism.context_parallel_degree > 1:
        from torchtitan.parallel.context.attention import check_attention

        mistakes.of(lambda: check_attention(model, parallelism=parallelism))
    if float8 is not None:
        from torchtitan.parallel.float8 import find_converted

        mistakes.of(lambda: find_converted(model, settings=float8))
    if (pp := parallelism.pipeline_parallel_degree) > 1 and not spec.stages:
        mistakes.add(
            "parallelism.pipeline_parallel_degree",
            f"must be 1 for {spec.name}, got {pp}: it does not run in stages (its ModelSpec has "
            f"stages = False)",
        )
    mistakes.report()


def plan_parallel(
    parallelism: ParallelismConfig,
    *,
    dims: ParallelDims,
    counts: Counts,
    num_layers: int,
    training: TrainingConfig,
    recomputes: bool,
    compiles: bool,
) -> tuple[Reshard, PipelineLayout | None]:
    """Plan when gathered weights are freed, and the stages of the pipeline.

    Args:
        parallelism: Degrees and schedule.
        dims: Resolved degrees.
        counts: Parameters of the model.
        num_layers: Layers of the model.
        training: Batch sizes.
        recomputes: Whether blocks are recomputed in backward.
        compiles: Whether blocks are compiled.

    Raises:
        ConfigError: Layers, stages, microbatches and schedule do not fit together.
    """
    mistakes = Mistakes()
    reshard = mistakes.of(lambda: find_reshard(parallelism, dims=dims))
    pipeline: PipelineLayout | None = None
    if dims.pp > 1:
        from torchtitan.parallel.pipeline.layout import plan_pipeline

        pipeline = mistakes.of(
            lambda: plan_pipeline(
                parallelism,
                num_layers=num_layers,
                counts=counts,
                training=training,
                frees_weights=reshard is not None and not reshard.keeps_last,
                recomputes=recomputes,
                compiles=compiles,
            )
        )
    mistakes.report()
    assert reshard is not None
    return reshard, pipeline


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
