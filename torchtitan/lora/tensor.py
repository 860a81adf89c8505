"""Adapters under tensor parallelism: they are split along with the matrix beside them.

Where the matrix is split by columns of its output, B is split the same way and A is a copy; where
it is split by rows of its input, A is split and B is a copy. So each rank multiplies its own part,
and the result lies over the ranks as the matrix's own product does: in parts, or as terms of a sum
that is computed anyway. Forward sends nothing for the adapters (DTensor by itself would sum the
R-wide product between them); in backward the ranks' gradients of a copy are summed.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial

import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
)
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

from torchtitan.models.spec import TensorRole
from torchtitan.parallel.copies import Copied


def low_rank(x: Tensor, a_RI: Tensor, b_OR: Tensor) -> Tensor:
    """Return B A x."""
    return F.linear(F.linear(x, a_RI), b_OR)


def adapter_style(role: TensorRole, *, stream: Placement) -> ParallelStyle:
    """Return how a linear layer with an adapter is split; `stream`: where a row's result goes."""
    if role in ("column", "gathered_column"):
        return _Column(input_layouts=stream if role == "gathered_column" else None)
    if role == "copied":
        return Copied(stream)
    assert role == "row", f"a linear layer is split by columns or rows, not as a {role}"
    return _Row(output_layouts=stream)


class _Column(ColwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements: dict[str, Placement] = {"weight": Shard(0), "bias": Shard(0)}
        placements |= {"lora_a": Replicate(), "lora_b": Shard(0)}
        _distribute(module, device_mesh, placements, result=Shard(-1))


class _Row(RowwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        placements: dict[str, Placement] = {"weight": Shard(1), "bias": Replicate()}
        placements |= {"lora_a": Shard(1), "lora_b": Replicate()}
        _distribute(module, device_mesh, placements, result=Partial())


def _distribute(
    module: nn.Module, mesh: DeviceMesh, placements: Mapping[str, Placement], *, result: Placement
) -> None:
    own = dict(module.named_parameters(recurse=False))  # a bias only where there is one
    for name, placement in placements.items():
        if name not in own:
            continue
        # None: parameters are on the meta device, there is nothing to send
        split = distribute_tensor(own[name], mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split))
    module.low_rank = partial(_own_part, result=result)


def _own_part(x: DTensor, a_RI: DTensor, b_OR: DTensor, *, result: Placement) -> DTensor:
    """Multiply this rank's part."""
    product = low_rank(*map(_local, (x, a_RI, b_OR)))
    return DTensor.from_local(product, x.device_mesh, [result], run_check=False)


def _local(tensor: DTensor) -> Tensor:
    """Return this rank's part; of a copy, each rank has one term of the gradient."""
    [placement] = tensor.placements
    gradient = Partial() if placement.is_replicate() else placement
    return tensor.to_local(grad_placements=[gradient])
