"""From degrees to device meshes.

The ranks of a job form a five-dimensional box: pp, dp_replicate, dp_shard, cp and tp, outermost
first, so that the ranks that talk most (tp) are neighbors. Parts of the trainer look at the same
box in their own way: parameters are sharded over dp_shard and cp together (`fsdp`), samples are
dealt out over both kinds of dp together. Experts are dealt out to `ep` neighbors among the ranks of
dp_shard, cp and tp, and sharded over the remaining ones (`efsdp`). Each view is a plain
`init_device_mesh` over the same ranks in the same order, so no private slicing or flattening of
torch is needed.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from torchtitan.base.errors import ConfigError
from torchtitan.mesh.settings import ParallelismConfig


@dataclass(frozen=True, kw_only=True)
class ParallelDims:
    """Degree of each axis, all of them at least 1."""

    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    """Degree within the ranks of dp_shard, cp and tp, not another axis."""

    @property
    def dp(self) -> int:
        """Number of ranks that read different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def fsdp(self) -> int:
        """Number of ranks over which FSDP shards a parameter."""
        return self.dp_shard * self.cp

    @property
    def efsdp(self) -> int:
        """Number of ranks over which FSDP shards an expert."""
        return self.fsdp * self.tp // self.ep

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return self.pp * self.dp * self.cp * self.tp

    def __str__(self) -> str:
        axes = {
            "pp": self.pp,
            "dp_replicate": self.dp_replicate,
            "dp_shard": self.dp_shard,
            "cp": self.cp,
            "tp": self.tp,
        }
        text = " x ".join(f"{name} {n}" for name, n in axes.items() if n > 1) or "one device"
        return f"{text}, experts dealt out to ep {self.ep}" if self.ep > 1 else text


def resolve_dims(settings: ParallelismConfig, *, world_size: int) -> ParallelDims:
    """Check the degrees against the number of ranks, and infer dp_shard if it is -1; raise
    ConfigError if the degrees do not multiply to `world_size`."""
    degrees = {
        "pipeline_parallel_degree": settings.pipeline_parallel_degree,
        "data_parallel_replicate_degree": settings.data_parallel_replicate_degree,
        "context_parallel_degree": settings.context_parallel_degree,
        "tensor_parallel_degree": settings.tensor_parallel_degree,
    }
    product, dp_shard = prod(degrees.values()), settings.data_parallel_shard_degree
    if dp_shard == -1:
        dp_shard = max(world_size // product, 1)
    if product * dp_shard != world_size:
        used = {name: degree for name, degree in degrees.items() if degree > 1}
        factors = ", ".join(f"{name} {n}" for name, n in used.items()) or "all other degrees 1"
        keys = [f"parallelism.{name}" for name in (*used, "data_parallel_shard_degree")]
        remedy = f"a multiple of {product}, or lower a degree"
        if settings.data_parallel_shard_degree != -1:
            factors += f", data_parallel_shard_degree {dp_shard}"
            remedy = f"{product * dp_shard}, or set data_parallel_shard_degree = -1 to use all"
        raise ConfigError.at(
            tuple(keys),
            f"the degrees' product must fit the number of ranks, got {product * dp_shard} "
            f"({factors}) for {world_size} ranks; start NGPU={product * dp_shard} ranks, {remedy}",
        )
    ep, inner = settings.expert_parallel_degree, dp_shard * product
    inner //= settings.pipeline_parallel_degree * settings.data_parallel_replicate_degree
    if inner % ep:
        fitting = ", ".join(str(n) for n in range(1, inner + 1) if inner % n == 0)
        raise ConfigError.at(
            ("parallelism.expert_parallel_degree", "parallelism.data_parallel_shard_degree"),
            f"must divide data_parallel_shard_degree x context_parallel_degree x "
            f"tensor_parallel_degree = {inner}, got {ep}; use one of {fitting}",
        )
    return ParallelDims(
        pp=settings.pipeline_parallel_degree,
        dp_replicate=settings.data_parallel_replicate_degree,
        dp_shard=dp_shard,
        cp=settings.context_parallel_degree,
        tp=settings.tensor_parallel_degree,
        ep=ep,
    )


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """Views of a job's ranks; see `build_mesh`."""

    dims: ParallelDims
    params: DeviceMesh
    """Axes pp, dp_replicate, fsdp, tp: layout of parameters."""
    data: DeviceMesh
    """Axes pp, dp, cp, tp: dp ranks read different samples, cp ranks parts of the same ones."""
    experts: DeviceMesh
    """Axes pp, dp_replicate, efsdp, ep: layout of experts."""

    @property
    def dp_rank(self) -> int:
        """This rank's index among the ranks that read different samples."""
        return self.data.get_local_rank("dp")

    @property
    def data_parallel(self) -> DeviceMesh:
        """Mesh for `fully_shard`: (fsdp), or (dp_replicate, fsdp) with replicas."""
        return self._with_replicas(self.params, "fsdp")

    @property
    def expert_data_parallel(self) -> DeviceMesh:
        """Mesh for `fully_shard` of experts: (efsdp), or (dp_replicate, efsdp)."""
        return self._with_replicas(self.experts, "efsdp")

    def _with_replicas(self, view: DeviceMesh, axis: str) -> DeviceMesh:
        return view["dp_replicate", axis] if self.dims.dp_replicate > 1 else view[axis]

    def groups(self) -> list[dist.ProcessGroup]:
        """Return all process groups of the views."""
        return [
            view.get_group(axis)
            for view in (self.params, self.data, self.experts)
            for axis in view.mesh_dim_names or ()
        ]


def build_mesh(dims: ParallelDims, *, device_type: str) -> Mesh:
    """Build the views; the default process group must exist and have `dims.world_size` ranks."""

    def view(**axes: int) -> DeviceMesh:
        return init_device_mesh(device_type, tuple(axes.values()), mesh_dim_names=tuple(axes))

    return Mesh(
        dims=dims,
        params=view(pp=dims.pp, dp_replicate=dims.dp_replicate, fsdp=dims.fsdp, tp=dims.tp),
        data=view(pp=dims.pp, dp=dims.dp, cp=dims.cp, tp=dims.tp),
        experts=view(pp=dims.pp, dp_replicate=dims.dp_replicate, efsdp=dims.efsdp, ep=dims.ep),
    )
