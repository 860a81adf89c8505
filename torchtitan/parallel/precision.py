"""Mixed precision: the dtype of a run, and bfloat16 from float32 weights on one rank.

FSDP2 casts weights when it gathers them. It works on one rank too, but copies each gradient three
times: into the buffer of a reduction over one rank, divided, and out of it. Here each module casts
its weight where it uses it, and autograd casts the gradient back, one pass each way. Weights,
gradients and optimizer state stay float32, microbatches are summed in float32, and every product is
computed from the same bfloat16 numbers as under FSDP2.

Two weights are not cast as a tensor. The embedding's rows are cast after the lookup, and the head's
loss takes the float32 weight and returns a float32 gradient (`optim/loss.py`). FSDP2 rounds the
gradient of the embedding to bfloat16, and up to torch 2.14 that of the head. Here both stay exact.
Gradients of norms are rounded, as FSDP2 does up to torch 2.14.

The alternative is autocast. It has rules of its own (norms and the residual stream become float32),
so one rank would train another model than many ranks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from torchtitan.base.device import has_bfloat16
from torchtitan.data.settings import TrainingConfig
from torchtitan.models.interface import CastsWeights


class _Linear(nn.Linear):
    """A linear layer that computes in the dtype of its input."""

    def forward(self, input: Tensor) -> Tensor:
        bias = None if self.bias is None else self.bias.to(input.dtype)
        return F.linear(input, self.weight.to(input.dtype), bias)


class _RMSNorm(nn.RMSNorm):
    """A norm that computes in the dtype of its input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


# Only the class of a module changes, as in `fully_shard`, so names, parameters, hooks and the
# compiled graph that equal blocks share stay the same
CASTING: dict[type[nn.Module], type[nn.Module]] = {
    nn.Linear: _Linear,
    nn.RMSNorm: _RMSNorm,
    nn.Embedding: nn.Embedding,
}


def _to_convert(model: nn.Module) -> list[nn.Module]:
    """Return the modules with weights that do not cast them already."""
    return [
        module
        for module in model.modules()
        if next(module.parameters(recurse=False), None) is not None
        and not isinstance(module, CastsWeights)
    ]


def can_compute_in(model: nn.Module) -> bool:
    """Return whether every module of `model` with weights casts them, or has a class that does."""
    return all(type(module) in CASTING for module in _to_convert(model))


def compute_in(model: nn.Module, *, dtype: torch.dtype) -> None:
    """Make `model` compute in `dtype`, in place. The dtype of its weights does not change."""
    for module in _to_convert(model):
        module.__class__ = CASTING[type(module)]

    def cast_rows(module: nn.Module, args: Any, rows: Tensor) -> Tensor:
        return rows.to(dtype)

    assert isinstance(model.tok_embeddings, nn.Embedding)
    model.tok_embeddings.register_forward_hook(cast_rows)


def resolve_precision(
    training: TrainingConfig, *, uses_float8: bool, device_type: str
) -> tuple[TrainingConfig, str]:
    """Return the settings with `mixed_precision_param = "auto"` replaced, and the reason.

    "auto" depends on the machine. The run's folder and checkpoints hold the type that was chosen,
    so a job that is resumed where "auto" means another type is refused. Collective.
    """
    if training.mixed_precision_param != "auto":
        return training, "as set"
    if training.dtype == "bfloat16":
        chosen, reason = "bfloat16", "auto: as the weights are stored"
    elif uses_float8:
        chosen, reason = "bfloat16", "auto: as float8 wants it"
    else:
        chosen, reason = _choose(device_type)
    return replace(training, mixed_precision_param=chosen), reason  # type: ignore[arg-type]


def _choose(device_type: str) -> tuple[str, str]:
    """Choose from the devices of all ranks, so that all of them compute in the same dtype."""
    device = "GPUs" if device_type == "cuda" else "CPUs"
    lacking = torch.tensor(int(not has_bfloat16(device_type)))  # on the host: no GPU is taken yet
    dist.all_reduce(lacking)
    num_lacking, world_size = int(lacking), dist.get_world_size()
    if num_lacking == 0:
        return "bfloat16", f"auto: the {device} have instructions for it"
    ranks = "all" if num_lacking == world_size else f"{num_lacking} of {world_size}"
    return "float32", f"auto: the {device} of {ranks} ranks have no bfloat16 instructions"
