"""The model as this rank holds it: built without memory, cut, made parallel, then filled.

build (meta) -> this rank's stages -> parallelize -> storage -> initial weights
"""

from __future__ import annotations

import torch

from torchtitan.config.schema import ActivationCheckpointConfig, ParallelismConfig, TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.models.init import initialize
from torchtitan.models.parts import ModelParts
from torchtitan.models.spec import DecoderConfig, ModelSpec
from torchtitan.parallel.apply import parallelize
from torchtitan.parallel.execution import Execution, LossFunction, WholeModel


def build_model(
    spec: ModelSpec,
    *,
    architecture: DecoderConfig,
    mesh: Mesh,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    device: torch.device,
    seed: int,
) -> ModelParts:
    """Build this rank's parts of the model with their initial weights."""
    with torch.device("meta"):
        part = spec.build(architecture).to(getattr(torch, training.dtype))
    parallelize(
        part,
        mesh=mesh,
        training=training,
        parallelism=parallelism,
        activation_checkpoint=activation_checkpoint,
    )
    part.to_empty(device="cpu" if training.enable_cpu_offload else device)
    initialize(part, seed=seed)
    return ModelParts([part])


def build_execution(parts: ModelParts, *, loss: LossFunction) -> Execution:
    """Build what runs batches through the parts."""
    [model] = parts
    return WholeModel(model, loss=loss)
