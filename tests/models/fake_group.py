"""A process group of any size in one process: communication does nothing, layouts are real."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_group(*, rank: int, world_size: int) -> Iterator[None]:
    """Be one rank of a group whose others do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        # DTensor's operators cache their results with the mesh, hence with this rank's place in it
        _clear_sharding_prop_cache()
