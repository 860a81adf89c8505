"""The layout of a job, planned and checked before anything is built."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torchtitan.base.errors import ConfigError, Mistakes
from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import ParallelDims
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import Counts, LanguageModel, TrainableParams
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec
from torchtitan.parallel.settings import ActivationCheckpointConfig, CompileConfig, Float8Config

if TYPE_CHECKING:
    from torchtitan.parallel.pipeline.layout import PipelineLayout

Adapt = Callable[[LanguageModel], None]
"""Changes the layers of a model on the meta device, before it is cut or split."""


@dataclass(frozen=True, kw_only=True)
class Reshard:
    """Handling of gathered weights between forward and backward."""

    after_forward: bool | int
    """Whether they are freed. A number: groups of this many ranks keep them together."""
    keeps_last: bool
    """Whether the last block's are kept, because backward starts with them."""


def find_reshard(settings: ParallelismConfig, *, dims: ParallelDims) -> Reshard:
    """Read fsdp_reshard_after_forward.

    A group of 1 rank is the same as "never", and a group of all ranks the same as "always". Raises
    ConfigError if the number of ranks does not divide those that share the weights, or FSDP2 cannot
    build such groups.
    """
    asked = settings.fsdp_reshard_after_forward
    if asked.isdecimal():
        asked = {dims.fsdp: "always", 1: "never"}.get(int(asked), asked)
    if not asked.isdecimal():
        frees = {"always": True, "never": False, "default": dims.pp == 1}[asked]
        return Reshard(after_forward=frees, keeps_last=asked != "always")
    num_ranks = int(asked)
    # FSDP2 builds the groups from this rank's part of the mesh, so ranks elsewhere would differ
    if dims.pp * dims.tp > 1 or not num_ranks or dims.fsdp % num_ranks:
        raise ConfigError.at(
            "parallelism.fsdp_reshard_after_forward",
            f"as a number of ranks must divide the {dims.fsdp} ranks that share the weights, "
            f"without pipeline or tensor parallelism, got {num_ranks}",
        )
    return Reshard(after_forward=num_ranks, keeps_last=True)


def check_parallel(
    model: LanguageModel,
    *,
    spec: ModelSpec,
    parallelism: ParallelismConfig,
    recomputation: ActivationCheckpointConfig,
    compilation: CompileConfig,
    float8: Float8Config | None,
    attn_mask_type: str,
) -> None:
    """Raise ConfigError unless a model can be compiled, converted and divided as the settings ask.

    The model is the full one, on the meta device.
    """
    mistakes = Mistakes()
    cp, tp = parallelism.context_parallel_degree, parallelism.tensor_parallel_degree
    if compilation.blocks:
        from torchtitan.parallel.compile import check_recomputation

        with mistakes:
            check_recomputation(model, recomputation, cp=cp, attn_mask_type=attn_mask_type)
    if tp > 1:
        from torchtitan.parallel.tensor import check_tensor_parallel

        with mistakes:
            check_tensor_parallel(model, plan=spec.tensor_plan, parallelism=parallelism)
    if parallelism.expert_parallel_degree > 1:
        from torchtitan.parallel.expert import check_expert_parallel

        with mistakes:
            check_expert_parallel(model, parallelism=parallelism)
    if cp > 1:
        from torchtitan.parallel.context.attention import check_attention

        with mistakes:
            check_attention(model, parallelism=parallelism)
    if float8 is not None:
        from torchtitan.parallel.float8 import check_layers

        with mistakes:
            check_layers(model, settings=float8, spec=spec, tp=tp)
    if (pp := parallelism.pipeline_parallel_degree) > 1 and not spec.stages:
        rule = f"must be 1 for {spec.name}, got {pp}: its ModelSpec has stages = False"
        mistakes.add("parallelism.pipeline_parallel_degree", rule)
    mistakes.report()


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
    """Raise ConfigError unless a machine with such devices has what the job computes with."""
    mistakes = Mistakes()
    if compilation.enable:
        from torchtitan.parallel.compile import check_compile

        with mistakes:
            check_compile(compilation)
    if float8 is not None:
        from torchtitan.parallel.float8 import check_float8

        with mistakes:
            check_float8(float8, device_type=device_type)
    mistakes.report()
