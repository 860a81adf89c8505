"""Shard, then initialise, equals initialise, then shard: bit for bit, in every layout."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.models.fake_group import fake_group
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize

SPEC = MODELS["llama3"]
TINY = SPEC.flavors["tiny"]

TP_DIM = {"wq": 0, "wk": 0, "wv": 0, "w1": 0, "w3": 0, "wo": 1, "w2": 1, "output": 0}
TP_DIM["tok_embeddings"] = 0

# shape of the mesh, its axes; 263 rows of vocabulary divide by none of the degrees
LAYOUTS = {
    "fsdp 2": {"fsdp": 2},
    "fsdp 3": {"fsdp": 3},
    "fsdp 8": {"fsdp": 8},
    "fsdp 40, many empty": {"fsdp": 40},
    "hsdp": {"replicate": 2, "fsdp": 3},
    "tp": {"tp": 4},
    "fsdp and tp": {"fsdp": 2, "tp": 2},
    "hsdp and tp": {"replicate": 2, "fsdp": 2, "tp": 2},
}


def shard(model: nn.Module, axes: dict[str, int], *, fsdp_dim: int = 0) -> None:
    mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    if "tp" in axes:
        shard_by_tp(model, mesh["tp"])
    if "fsdp" in axes:
        names = tuple(axis for axis in axes if axis != "tp")
        for module in (*model.layers.values(), model):
            fully_shard(
                module,
                mesh=mesh[names] if len(names) > 1 else mesh[names[0]],
                shard_placement_fn=lambda p: Shard(fsdp_dim) if p.ndim == 2 else Shard(0),
            )


def shard_by_tp(model: nn.Module, mesh) -> None:
    for name, parameter in list(model.named_parameters()):
        path, module_name = name.removesuffix(".weight"), name.split(".")[-2]
        placement = Shard(TP_DIM[module_name]) if module_name in TP_DIM else Replicate()
        local = distribute_tensor(parameter.detach(), mesh, [placement], src_data_rank=None)
        model.get_submodule(path).weight = nn.Parameter(local)


def initialised_then_sharded(axes, *, fsdp_dim=0):
    model = SPEC.build(TINY)
    initialize(model, seed=3)
    shard(model, axes, fsdp_dim=fsdp_dim)
    return model


def sharded_then_initialised(axes, *, fsdp_dim=0):
    with torch.device("meta"):
        model = SPEC.build(TINY)
    shard(model, axes, fsdp_dim=fsdp_dim)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.constant_(parameter.detach().to_local(), float("nan"))
    initialize(model, seed=3)
    return model


def test_fsdp_can_cut_columns():
    for rank in range(4):
        with fake_group(rank=rank, world_size=4):
            expected = dict(initialised_then_sharded({"fsdp": 4}, fsdp_dim=1).named_parameters())
            actual = sharded_then_initialised({"fsdp": 4}, fsdp_dim=1)
            for name, parameter in actual.named_parameters():
                assert parameter.placements == (Shard(parameter.ndim - 1),)
                assert torch.equal(parameter.to_local(), expected[name].to_local()), name


@pytest.mark.promise("initial-weights")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_each_rank_fills_its_own_shard(layout):
    axes = LAYOUTS[layout]
    world_size = int(torch.tensor(list(axes.values())).prod())
    for rank in range(0, world_size, max(1, world_size // 8)):
        with fake_group(rank=rank, world_size=world_size):
            expected = dict(initialised_then_sharded(axes).named_parameters())
            for name, parameter in sharded_then_initialised(axes).named_parameters():
                assert parameter.placements == expected[name].placements
                assert torch.equal(parameter.to_local(), expected[name].to_local()), name
