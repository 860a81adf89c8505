"""The model as this rank holds it: built without memory, cut, made parallel, then filled.

build (meta) -> this rank's stages -> parallelize -> storage -> initial weights
"""

from __future__ import annotations

from functools import partial

import torch

from torchtitan.data.settings import TrainingConfig
from torchtitan.lora.settings import LoRAConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.contract import LanguageModel
from torchtitan.models.decoder import HeadLoss
from torchtitan.models.init import initialize
from torchtitan.models.lora import apply_lora
from torchtitan.models.parts import ModelParts
from torchtitan.models.spec import DecoderConfig, ModelSpec
from torchtitan.models.trained import Trained
from torchtitan.parallel.apply import parallelize
from torchtitan.parallel.execution import Execution, WholeModel
from torchtitan.parallel.pipeline.execution import Pipeline, find_shapes
from torchtitan.parallel.pipeline.layout import PipelineLayout
from torchtitan.parallel.settings import ActivationCheckpointConfig, CompileConfig, Float8Config


def build_model_and_execution(
    spec: ModelSpec,
    *,
    architecture: DecoderConfig,
    mesh: Mesh,
    layout: PipelineLayout | None,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compiler: CompileConfig,
    float8: Float8Config | None,
    lora: LoRAConfig,
    trained: Trained,
    device: torch.device,
    seed: int,
    loss: HeadLoss,
) -> tuple[ModelParts, Execution]:
    """Build this rank's parts of the model, and what runs batches through all ranks' parts."""

    def build_part(modules: tuple[str, ...] | None) -> LanguageModel:
        part = _on_meta(spec, architecture, dtype=getattr(torch, training.dtype), lora=lora)
        _cut(part, modules=modules, loss=loss)
        parallelize(
            part,
            mesh=mesh,
            tensor_plan=spec.tensor_plan,
            training=training,
            parallelism=parallelism,
            activation_checkpoint=activation_checkpoint,
            compiler=compiler,
            float8=float8,
            trained=trained,
        )
        part.to_empty(device="cpu" if training.enable_cpu_offload else device)
        initialize(part, seed=seed)
        return part

    if layout is None:
        model = build_part(None)
        return ModelParts([model]), WholeModel(model)
    own = layout.stages_of(mesh.params.get_local_rank("pp"))
    parts = ModelParts([build_part(layout.modules[stage]) for stage in own])
    shapes = partial(
        find_shapes,
        architecture,
        microbatch_size=layout.microbatch_size,
        settings=parallelism,
        tp=mesh.dims.tp,
        dtype=getattr(torch, training.mixed_precision_param),
    )
    return parts, Pipeline(
        parts,
        layout=layout,
        shapes=shapes,
        seq_len=training.seq_len // mesh.dims.cp,
        group=mesh.params.get_group("pp"),
        device=device,
        tied=architecture.tie_embeddings,
    )


def _on_meta(
    spec: ModelSpec, architecture: DecoderConfig, *, dtype: torch.dtype, lora: LoRAConfig
) -> LanguageModel:
    model = spec.build_meta(architecture).to(dtype)
    if lora.rank:
        apply_lora(model, rank=lora.rank, alpha=lora.alpha, patterns=lora.modules)
    return model


def _cut(part: LanguageModel, *, modules: tuple[str, ...] | None, loss: HeadLoss) -> None:
    """Keep a stage's modules, None: all, and give the head, if it is there, its loss."""
    if modules is not None:
        part.keep_only(modules)
    if part.output is not None:
        part.output.loss = loss
