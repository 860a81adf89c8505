"""The copy that an asynchronous save is written from."""

from __future__ import annotations

import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.rank_pool import RankPool
from torchtitan.checkpoint.staging import Staging
from torchtitan.checkpoint.storage import Component


def stage_twice() -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    tensors = {"plain": torch.arange(3), "sharded": sharded}
    staging = Staging()
    found = []
    for step in range(2):
        before = {name: t.clone() for name, t in tensors.items()}
        copy = staging.copy({"model": Component(tensors=tensors, state={"step": step})})["model"]
        for t in tensors.values():
            t += 7  # training goes on
        assert copy.state == {"step": step}
        for name, t in copy.tensors.items():
            assert isinstance(t, DTensor) == (name == "sharded")
            now, then = (
                x.full_tensor() if isinstance(x, DTensor) else x for x in (t, before[name])
            )
            local = t.to_local() if isinstance(t, DTensor) else t
            found.append((now.clone(), then, local.data_ptr()))
    return found


def test_a_copy_keeps_what_training_changes_in_memory_that_is_kept(ranks: RankPool) -> None:
    for found in ranks.run(stage_twice, world=2):
        assert all(torch.equal(now, then) for now, then, _ in found)
        addresses = [address for _, _, address in found]
        assert addresses[:2] == addresses[2:]


def test_another_shape_gets_other_memory() -> None:
    staging = Staging()
    for tensor in (torch.ones(3), torch.ones(4), torch.ones(4, dtype=torch.int32)):
        copy = staging.copy({"model": Component(tensors={"a": tensor})})["model"].tensors["a"]
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)
