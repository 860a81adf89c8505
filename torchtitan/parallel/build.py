"""The model as this rank holds it: built without memory, cut, made parallel, then filled.

build (meta) -> this rank's stages -> parallelize -> storage -> initial weights
"""

from __future__ import annotations

from functools import partial

import torch

from torchtitan.config.schema import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.models.decoder import Decoder
from torchtitan.models.init import initialize
from torchtitan.models.parts import ModelParts
from torchtitan.models.spec import DecoderConfig, ModelSpec
from torchtitan.parallel.apply import parallelize
from torchtitan.parallel.execution import Execution, LossFunction, WholeModel
from torchtitan.parallel.pipeline import Pipeline, find_shapes
from torchtitan.parallel.pipeline_layout import PipelineLayout


def build_model(
    spec: ModelSpec,
    *,
    architecture: DecoderConfig,
    mesh: Mesh,
    layout: PipelineLayout | None,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    device: torch.device,
    seed: int,
) -> ModelParts:
    """Build this rank's parts of the model, those of its pipeline stages, with initial weights."""

    def build_part(modules: tuple[str, ...] | None) -> Decoder:
        with torch.device("meta"):
            part = spec.build(architecture).to(getattr(torch, training.dtype))
        if modules is not None:
            part.keep_only(modules)
        parallelize(
            part,
            mesh=mesh,
            training=training,
            parallelism=parallelism,
            activation_checkpoint=activation_checkpoint,
        )
        part.to_empty(device="cpu" if training.enable_cpu_offload else device)
        initialize(part, seed=seed)
        return part

    if layout is None:
        return ModelParts([build_part(None)])
    own = layout.stages_of(mesh.params.get_local_rank("pp"))
    return ModelParts([build_part(layout.modules[stage]) for stage in own])


def build_execution(
    parts: ModelParts,
    *,
    architecture: DecoderConfig,
    mesh: Mesh,
    layout: PipelineLayout | None,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    device: torch.device,
    loss: LossFunction,
) -> Execution:
    """Build what runs batches through the parts."""
    if layout is None:
        [model] = parts
        return WholeModel(model, loss=loss)
    shapes = partial(
        find_shapes,
        architecture,
        microbatch_size=layout.microbatch_size,
        settings=parallelism,
        tp=mesh.dims.tp,
        dtype=getattr(torch, training.mixed_precision_param),
    )
    return Pipeline(
        parts,
        layout=layout,
        shapes=shapes,
        seq_len=training.seq_len,
        loss=loss,
        group=mesh.params.get_group("pp"),
        device=device,
        tied=architecture.tie_embeddings,
    )
