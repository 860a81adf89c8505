"""The model as this rank holds it.

build on meta -> adapt -> keep this rank's stages -> parallelize -> allocate -> initialise
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.distributed.tensor import DTensor

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.cast import cast
from torchtitan.models.contract import LanguageModel
from torchtitan.models.decoder import HeadLoss
from torchtitan.models.init import initialize
from torchtitan.models.parts import ModelParts
from torchtitan.models.routing import untrained
from torchtitan.parallel.apply import parallelize
from torchtitan.parallel.execution import Execution, WholeModel
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.pipeline.execution import build_pipeline
from torchtitan.parallel.settings import ActivationCheckpointConfig, CompileConfig


def build_model_and_execution(
    layout: Layout,
    *,
    mesh: Mesh,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    recomputation: ActivationCheckpointConfig,
    compilation: CompileConfig,
    device: torch.device,
    loss: HeadLoss,
    fill: Callable[[LanguageModel], None],
) -> tuple[ModelParts, Execution]:
    """Build this rank's parts of the model, and what runs batches through all ranks' parts.

    `fill` gives a part, so far on the meta device, memory and initial weights.
    """

    def build_part(modules: tuple[str, ...] | None) -> LanguageModel:
        part = layout.spec.build_meta(layout.architecture)
        cast(part, getattr(torch, training.dtype))
        if layout.adapt is not None:
            layout.adapt(part)
        if modules is not None:
            part.keep_only(modules)
        if part.output is not None:
            part.output.loss = loss
        parallelize(
            part,
            mesh=mesh,
            layout=layout,
            training=training,
            parallelism=parallelism,
            recomputation=recomputation,
            compilation=compilation,
        )
        _check_placements(part, mesh=mesh)
        fill(part)
        return part

    if layout.pipeline is None:
        model = build_part(None)
        return ModelParts([model]), WholeModel(model)
    own = layout.pipeline.stages_of(mesh.params.get_local_rank("pp"))
    parts = ModelParts([build_part(layout.pipeline.modules[stage]) for stage in own])
    pipeline = build_pipeline(
        parts,
        layout=layout,
        mesh=mesh,
        training=training,
        sequence_parallel=parallelism.enable_sequence_parallel,
        device=device,
    )
    return parts, pipeline


def materialize(part: LanguageModel, *, device: torch.device, offloads: bool, seed: int) -> None:
    """Allocate the weights of a part and fill them."""
    allocate(part, device=device, offloads=offloads)
    initialize(part, seed=seed)


def allocate(part: LanguageModel, *, device: torch.device, offloads: bool) -> None:
    """Give the weights of a part memory on the device, or where the host offloads them."""
    part.to_empty(device="cpu" if offloads else device)
    for state in untrained(part):  # too small to fetch in every layer
        state.data = torch.empty_like(state, device=device)


def _check_placements(part: LanguageModel, *, mesh: Mesh) -> None:
    """Check that every parameter lies on a mesh of all ranks of its stage, on any axes.

    `optim.clip.global_norm` relies on it: it counts copies along a parameter's own mesh, so a copy
    outside that mesh would count twice.
    """
    num_ranks, state = mesh.dims.world_size // mesh.dims.pp, set(untrained(part))
    for name, parameter in part.named_parameters():
        if parameter in state:
            continue
        found = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        assert found == num_ranks, f"{name} lies on a mesh of {found} ranks, not of {num_ranks}"
