"""Low-rank factors under tensor parallelism: they follow the matrix beside which they stand.

Of a matrix split by columns of its output, B is split the same way and A is a copy; of one split by
rows of its input, A is, and B is a copy. So each rank multiplies its own part, and what comes out
lies as the matrix's own product does: in parts, or as terms of a sum that is taken anyway. Nothing
is sent for the factors in forward, where DTensor by itself would sum the R-wide product between
them. In backward each rank has its part of the copy's gradient, and their sum is the whole.
"""

from __future__ import annotations

from functools import partial

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

from torchtitan.models.lora import LoRALinear, low_rank
from torchtitan.models.spec import TensorRole


def low_rank_style(role: TensorRole, *, stream: Placement) -> ParallelStyle:
    """Return how a linear layer with factors is split; `stream` is what a row's result lies in."""
    if role == "column":
        return _Column()
    assert role == "row", f"a linear layer is split by columns or rows, not as a {role}"
    return _Row(output_layouts=stream)


class _Column(ColwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        layout = {"weight": Shard(0), "lora_a": Replicate(), "lora_b": Shard(0)}
        _distribute(module, device_mesh, layout, result=Shard(-1))


class _Row(RowwiseParallel):
    def _partition_linear_fn(self, name: str, module: nn.Module, device_mesh: DeviceMesh) -> None:
        layout = {"weight": Shard(1), "lora_a": Shard(1), "lora_b": Replicate()}
        _distribute(module, device_mesh, layout, result=Partial())


def _distribute(
    module: nn.Module, mesh: DeviceMesh, layout: dict[str, Placement], *, result: Placement
) -> None:
    assert isinstance(module, LoRALinear)
    for name, placement in layout.items():
        # nothing is sent: parameters are on the meta device
        split = distribute_tensor(module.get_parameter(name), mesh, [placement], src_data_rank=None)
        module.register_parameter(name, nn.Parameter(split))
    module.low_rank = partial(_own_part, result=result)


def _own_part(x: DTensor, a_RI: DTensor, b_OR: DTensor, *, result: Placement) -> DTensor:
    """Multiply this rank's part."""
    product = low_rank(*map(_local, (x, a_RI, b_OR)))
    return DTensor.from_local(product, x.device_mesh, [result], run_check=False)


def _local(tensor: DTensor) -> Tensor:
    """Return this rank's part; of what is a copy, each rank has a term of the gradient."""
    [placement] = tensor.placements
    gradient = Partial() if placement.is_replicate() else placement
    return tensor.to_local(grad_placements=[gradient])
