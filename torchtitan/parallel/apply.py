"""The order in which a model is made parallel, in one place.

    float8 -> tensor parallel -> freezing -> context parallel -> compile -> activation
    checkpointing -> FSDP

Each step wraps what the earlier ones left: the compiler must see the sharded layers, recomputation
replays them compiled, and FSDP gathers around all of it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.spec import TensorRole
from torchtitan.models.trained import Trained
from torchtitan.parallel.activation import Mode, apply_activation_checkpointing, selects_operators
from torchtitan.parallel.compile import apply_compile
from torchtitan.parallel.context.build import apply_context_parallel
from torchtitan.parallel.float8 import apply_float8
from torchtitan.parallel.fsdp import FSDPPolicy, apply_fsdp, find_reshard, name_reshard
from torchtitan.parallel.precision import can_compute_in, compute_in
from torchtitan.parallel.settings import ActivationCheckpointConfig, CompileConfig, Float8Config
from torchtitan.parallel.tensor import apply_tensor_parallel


def parallelize(
    model: nn.Module,
    *,
    mesh: Mesh,
    tensor_plan: Mapping[str, TensorRole],
    training: TrainingConfig,
    parallelism: ParallelismConfig,
    activation_checkpoint: ActivationCheckpointConfig,
    compiler: CompileConfig,
    float8: Float8Config | None,
    trained: Trained,
) -> None:
    """Make `model`, still on the meta device, parallel in place."""
    if float8 is not None:
        apply_float8(model, settings=float8)
    if mesh.dims.tp > 1:
        apply_tensor_parallel(
            model,
            mesh=mesh.params["tp"],
            plan=tensor_plan,
            sequence_parallel=parallelism.enable_sequence_parallel,
            loss_parallel=not parallelism.disable_loss_parallel,
        )
    trained.freeze_others(model)  # behind tensor parallelism, which makes new parameters
    mode, option = activation_checkpoint.mode, activation_checkpoint.selective_ac_option
    recomputed: Mode = "none" if mode == "memory_budget" else mode  # the compiler's business then
    apply_context_parallel(
        model,
        mesh=mesh,
        parallelism=parallelism,
        as_one_operator=selects_operators(recomputed, option),
    )
    if compiler.enable:
        apply_compile(
            model,
            backend=compiler.backend,
            memory_budget=activation_checkpoint.memory_budget if mode == "memory_budget" else 1.0,
            opaque_attention=mesh.dims.cp > 1 or training.document_attention == "within",
            sequence_comes_async=mesh.dims.tp > 1,
        )
    apply_activation_checkpointing(model, mode=recomputed, option=option)
    policy = FSDPPolicy(
        param_dtype=getattr(torch, training.mixed_precision_param),
        reduce_dtype=getattr(torch, training.mixed_precision_reduce),
        reshard_after_forward=find_reshard(parallelism, dims=mesh.dims),
        keep_last=name_reshard(parallelism, dims=mesh.dims) != "always",
        cpu_offload=training.enable_cpu_offload,
    )
    # a layer in float8 takes its weight as it is: FSDP casts that, on one rank too
    if mesh.dims.world_size > 1 or policy.cpu_offload or float8 is not None:
        apply_fsdp(model, mesh=mesh.data_parallel, policy=policy)
    elif training.mixed_precision_param == training.dtype:
        pass  # as stored
    elif can_compute_in(model):
        compute_in(model, dtype=policy.param_dtype)
    else:  # slower, and right for every module
        apply_fsdp(model, mesh=mesh.data_parallel, policy=policy)
