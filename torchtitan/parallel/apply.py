"""The order in which a model is made parallel, in one place.

    float8 -> tensor parallel -> expert parallel -> freezing -> context parallel -> compile ->
    activation checkpointing -> FSDP

Each step wraps the result of the earlier ones: the compiler must see the sharded layers,
recomputation replays them compiled, and FSDP gathers around all of it.
"""

from __future__ import annotations

import torch
from torch import nn

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.contract import has_window
from torchtitan.parallel.activation import Mode, apply_activation_checkpointing, selects_operators
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.context.build import apply_context_parallel
from torchtitan.parallel.expert import apply_expert_parallel, group_products
from torchtitan.parallel.float8 import apply_float8
from torchtitan.parallel.fsdp import apply_fsdp
from torchtitan.parallel.layout import Layout
from torchtitan.parallel.precision import can_compute_in, compute_in
from torchtitan.parallel.settings import ActivationCheckpointConfig, CompileConfig
from torchtitan.parallel.tensor import apply_tensor_parallel


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
    """Make `model`, still on the meta device, parallel in place."""
    if layout.float8 is not None:
        apply_float8(model, settings=layout.float8)
    if mesh.dims.tp > 1:
        apply_tensor_parallel(
            model,
            mesh=mesh.params["tp"],
            plan=layout.spec.tensor_plan,
            sequence_parallel=parallelism.enable_sequence_parallel,
            loss_parallel=not parallelism.disable_loss_parallel,
        )
    if mesh.dims.ep > 1:
        apply_expert_parallel(model, mesh=mesh.experts["ep"])
    group_products(
        model,
        device_type=mesh.params.device_type,
        dtype=getattr(torch, training.mixed_precision_param),
    )
    layout.trained.freeze_others(model)  # behind these two, which make new parameters
    mode, option = recomputation.mode, recomputation.selective_ac_option
    recomputed: Mode = "none" if mode == "memory_budget" else mode  # then the compiler does it
    apply_context_parallel(
        model,
        mesh=mesh,
        parallelism=parallelism,
        as_one_operator=selects_operators(recomputed, option),
    )
    if compilation.enable:
        apply_compile(
            model,
            backend=compilation.backend,
            memory_budget=recomputation.memory_budget if mode == "memory_budget" else 1.0,
            opaque_attention=mesh.dims.cp > 1
            or training.document_attention == "within"
            or has_window(model),
            sequence_comes_async=mesh.dims.tp > 1,
        )
    apply_activation_checkpointing(model, mode=recomputed, option=option)
    _shard(model, mesh=mesh, layout=layout, training=training)


def _shard(model: nn.Module, *, mesh: Mesh, layout: Layout, training: TrainingConfig) -> None:
    """Shard the model, or only cast its weights where one rank has them all."""
    # a layer in float8 takes its weight as it is: FSDP casts that, on one rank too
    needs_fsdp = (
        mesh.dims.world_size > 1 or training.enable_cpu_offload or layout.float8 is not None
    )
    if not needs_fsdp and training.mixed_precision_param == training.dtype:
        return
    if not needs_fsdp and can_compute_in(model):
        compute_in(model, dtype=getattr(torch, training.mixed_precision_param))
    else:  # on one rank slower than casting, but right for every module
        apply_fsdp(
            model,
            mesh=mesh.data_parallel,
            experts_mesh=mesh.expert_data_parallel,
            training=training,
            reshard=layout.reshard,
        )
