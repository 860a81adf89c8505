"""A process's place in the job."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rank_pool import RankPool
from torchtitan.mesh.dims import ParallelDims, build_mesh
from torchtitan.mesh.ranks import RankInfo, read_rank_info, set_timeout

MEETING_POINT = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    assert read_rank_info({}) == RankInfo(rank=0, local_rank=0, world_size=1)


def test_torchruns_variables() -> None:
    environ = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", **MEETING_POINT}
    assert read_rank_info(environ) == RankInfo(rank=9, local_rank=1, world_size=16)


def timeouts(seconds: int | None) -> set[float]:
    mesh = build_mesh(ParallelDims(dp_shard=2), device_type="cpu")
    if seconds is not None:
        set_timeout(seconds, groups=mesh.groups())
    groups = [dist.group.WORLD, *mesh.groups()]
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    return {option._timeout.total_seconds() for option in options}


@pytest.mark.promise("hangs")
def test_a_timeout_reaches_every_group(ranks: RankPool) -> None:
    assert len(ranks.run(timeouts, None, world=2)[0]) > 1  # torch's own differ: hence set_timeout
    assert ranks.run(timeouts, 77, world=2) == [{77.0}, {77.0}]
