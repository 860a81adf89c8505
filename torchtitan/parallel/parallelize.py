"""The order of the transforms that make a model parallel, in one place.

    float8 -> tensor parallel -> expert parallel -> grouped products -> freezing ->
    context parallel -> compile -> activation checkpointing -> FSDP

Each transform wraps the result of the earlier ones: the compiler must see the sharded layers,
recomputation replays compiled blocks, and FSDP gathers weights around all of it.

The parts of a rank are built on the meta device and adapted, pruned to its pipeline stages, made
parallel, allocated and initialized.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.init import initialize
from torchtitan.models.interface import (
    GroupedExperts,
    HeadLoss,
    LanguageModel,
    ModelParts,
    cast,
    router_biases,
)
from torchtitan.parallel.execution import Execution, WholeModel
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.precision import can_compute_in, compute_in
from torchtitan.parallel.settings import BY_OPERATOR, ActivationCheckpointConfig, CompileConfig

Mode = Literal["none", "full", "selective"]


def parallelize(
    model: nn.Module,
    *,
    mesh: Mesh,
    layout: Layout,
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    recomputation: ActivationCheckpointConfig,
    compilation: CompileConfig,
) -> None:
    """Make a model or a pipeline stage on the meta device parallel, in place."""
    if layout.float8 is not None:
        from torchtitan.parallel.float8 import apply_float8

        apply_float8(model, settings=layout.float8)
    if mesh.dims.tp > 1:
        from torchtitan.parallel.tensor import apply_tensor_parallel

        apply_tensor_parallel(
            model,
            mesh=mesh.params["tp"],
            plan=layout.spec.tensor_plan,
            sequence_parallel=parallelism.enable_sequence_parallel,
            loss_parallel=not parallelism.disable_loss_parallel,
        )
    if any(isinstance(module, GroupedExperts) for module in model.modules()):
        from torchtitan.parallel.expert import apply_expert_parallel, apply_grouped_products

        if mesh.dims.ep > 1:
            apply_expert_parallel(model, mesh=mesh.experts["ep"])
        dtype = getattr(torch, training.mixed_precision_param)
        apply_grouped_products(model, device_type=mesh.params.device_type, dtype=dtype)
    layout.trained.freeze_rest(model)  # after tensor and expert parallel, which replace parameters
    mode, option = recomputation.mode, recomputation.selective_ac_option
    is_split = layout.pipeline is not None and layout.pipeline.splits_backward
    # the compiler follows a memory budget by itself
    recomputed: Mode = "none" if is_split or mode == "memory_budget" else mode
    keeps = recomputed == "selective" and option == BY_OPERATOR
    if mesh.dims.cp > 1:
        from torchtitan.parallel.context.attention import apply_context_parallel

        apply_context_parallel(model, mesh=mesh, parallelism=parallelism, keep_output=keeps)
    if compilation.blocks:
        from torchtitan.parallel.compile import apply_compile, has_opaque_attention

        apply_compile(
            model,
            backend=compilation.backend,
            memory_budget=recomputation.memory_budget if mode == "memory_budget" else 1.0,
            opaque_attention=has_opaque_attention(
                model, cp=mesh.dims.cp, attn_mask_type=training.attn_mask_type
            ),
            sequence_comes_async=mesh.dims.tp > 1,
            keeps_operators=keeps,
        )
        recomputed = "none" if keeps else recomputed
    if recomputed != "none":
        from torchtitan.parallel.activation import apply_activation_checkpointing

        apply_activation_checkpointing(model, mode=recomputed, option=option)
    _shard(model, mesh=mesh, layout=layout, training=training)


def _shard(model: nn.Module, *, mesh: Mesh, layout: Layout, training: TrainingConfig) -> None:
    """Shard the model, or only cast its weights if one rank has all of them."""
    # a float8 layer does not cast its weight: FSDP does, on one rank too
    needs_fsdp = (
        mesh.dims.world_size > 1 or training.enable_cpu_offload or layout.float8 is not None
    )
    if not needs_fsdp and training.mixed_precision_param == training.dtype:
        return
    if not needs_fsdp and can_compute_in(model):
        compute_in(model, dtype=getattr(torch, training.mixed_precision_param))
    else:  # on one rank slower than casting, but correct for every module
        from torchtitan.parallel.fsdp import apply_fsdp

        apply_fsdp(
            model,
            mesh=mesh.data_parallel,
            experts_mesh=mesh.expert_data_parallel,
            training=training,
            reshard=layout.reshard,
        )


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
    """Build this rank's parts of the model, and the execution of batches by all ranks.

    `fill` allocates and initializes a part that is on the meta device.
    """

    def build_part(modules: tuple[str, ...] | None) -> LanguageModel:
        part = layout.spec.build_meta(layout.architecture)
        cast(part, getattr(torch, training.dtype))
        if layout.adapt is not None:
            layout.adapt(part)
        if modules is not None:
            part.prune_to_stage(modules)
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
    from torchtitan.parallel.pipeline.execution import Pipeline

    own = layout.pipeline.stages_of(mesh.params.get_local_rank("pp"))
    parts = ModelParts([build_part(layout.pipeline.modules[stage]) for stage in own])
    return parts, Pipeline(
        parts,
        layout=layout,
        mesh=mesh,
        training=training,
        sequence_parallel=parallelism.enable_sequence_parallel,
        device=device,
    )


def materialize(part: LanguageModel, *, device: torch.device, offloads: bool, seed: int) -> None:
    """Allocate and initialize the weights of a part."""
    allocate(part, device=device, offloads=offloads)
    initialize(part, seed=seed)


def allocate(part: LanguageModel, *, device: torch.device, offloads: bool) -> None:
    """Allocate the weights of a part, on the device or, if they are offloaded, on the CPU."""
    part.to_empty(device="cpu" if offloads else device)
    for state in router_biases(part):  # on the device: not worth a copy per layer
        state.data = torch.empty_like(state, device=device)


def _check_placements(part: LanguageModel, *, mesh: Mesh) -> None:
    """Check that the mesh of every parameter covers all ranks of its stage.

    `optim.clip.global_norm` counts copies along a parameter's own mesh, so a copy outside that mesh
    would count twice.
    """
    num_ranks, state = mesh.dims.world_size // mesh.dims.pp, set(router_biases(part))
    for name, parameter in part.named_parameters():
        if parameter in state:
            continue
        num_on_mesh = parameter.device_mesh.size() if isinstance(parameter, DTensor) else 1
        assert num_on_mesh == num_ranks, (
            f"{name} is on a mesh of {num_on_mesh} ranks, not of {num_ranks}"
        )
