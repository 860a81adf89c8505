"""The copy that an asynchronous save is written from."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.distributed.rank_pool import RankPool
from torchtitan.checkpoint.manager import Staging
from torchtitan.checkpoint.state import Component


def stage_twice() -> list[tuple[torch.Tensor, torch.Tensor, int]]:
    mesh = init_device_mesh("cpu", (2,))
    sharded = distribute_tensor(torch.arange(5.0), mesh, [Shard(0)])
    tensors = {"plain": torch.arange(3), "sharded": sharded}
    stage = Staging()
    found = []
    for step in range(2):
        before = {name: t.clone() for name, t in tensors.items()}
        copy = stage.copy({"model": Component(tensors=tensors, state={"step": step})})["model"]
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
    stage = Staging()
    for tensor in (torch.ones(3), torch.ones(4), torch.ones(4, dtype=torch.int32)):
        copy = stage.copy({"model": Component(tensors={"a": tensor})})["model"].tensors["a"]
        assert copy.dtype == tensor.dtype
        assert torch.equal(copy, tensor)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_page_locked_copies_of_a_gpu(tmp_path_factory: pytest.TempPathFactory) -> None:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("cpu:gloo,cuda:nccl", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1,))
        sharded = distribute_tensor(torch.rand(1 << 20, device="cuda"), mesh, [Shard(0)])
        tensors = {"plain": torch.rand(1 << 20, device="cuda"), "sharded": sharded}
        stage = Staging(pinned=True)
        addresses = []
        for _ in range(2):
            before = {name: t.clone() for name, t in tensors.items()}
            copy = stage.copy({"model": Component(tensors=tensors)})["model"].tensors
            for t in tensors.values():
                t += 7  # training goes on
            for name, then in before.items():
                local, expected = (
                    t.to_local() if isinstance(t, DTensor) else t for t in (copy[name], then)
                )
                assert isinstance(copy[name], DTensor) == (name == "sharded")
                assert local.is_pinned()
                assert torch.equal(local, expected.cpu())
                addresses.append(local.data_ptr())
        assert addresses[:2] == addresses[2:]
    finally:
        dist.destroy_process_group()
