"""Degrees: inference of -1, and a refusal with numbers and a remedy for what cannot be."""

from __future__ import annotations

import torch.distributed as dist

from tests.distributed.rank_pool import RankPool
from torchtitan.mesh.dims import ParallelDims, build_mesh, resolve_dims
from torchtitan.mesh.settings import ParallelismConfig


def test_shard_degree_takes_the_ranks_left_over() -> None:
    settings = ParallelismConfig(data_parallel_replicate_degree=2, tensor_parallel_degree=4)
    dims = resolve_dims(settings, world_size=24)
    assert dims == ParallelDims(dp_replicate=2, dp_shard=3, tp=4)
    assert (dims.dp, dims.fsdp, dims.world_size) == (6, 3, 24)
    assert str(dims) == "dp_replicate 2 x dp_shard 3 x tp 4"


def test_context_parallel_ranks_share_samples_and_shard_parameters() -> None:
    dims = resolve_dims(ParallelismConfig(context_parallel_degree=2), world_size=8)
    assert (dims.dp, dims.fsdp) == (4, 8)


def views(dims: ParallelDims) -> dict[str, list[int]]:
    mesh = build_mesh(dims, device_type="cpu")
    return {
        "dp": [mesh.dp_rank],
        "fsdp": dist.get_process_group_ranks(mesh.params.get_group("fsdp")),
        "tp": dist.get_process_group_ranks(mesh.params.get_group("tp")),
        "fully_shard": mesh.data_parallel.mesh.flatten().tolist(),
    }


def test_views_of_eight_ranks(ranks: RankPool) -> None:
    dims = ParallelDims(dp_replicate=2, dp_shard=2, tp=2)
    answers = ranks.run(views, dims, world=8)
    assert answers[5] == {
        "dp": [2],
        "fsdp": [5, 7],
        "tp": [4, 5],
        "fully_shard": [1, 3, 5, 7],
    }
    assert [answer["dp"][0] for answer in answers] == [0, 0, 1, 1, 2, 2, 3, 3]
