"""Which ranks see the same local folder.

Beside an object store no disk needs to be shared: each machine has its own, with the files of its
own ranks. Names of hosts do not tell (containers share a host, hosts share a disk), so ranks look:
each leaves a mark in the folder, and those that see the same marks are on one disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan.checkpoint.ranks import on_every_rank, on_first_rank


def find_disks(
    folder: Path, *, group: dist.ProcessGroup, timeout: timedelta
) -> dist.ProcessGroup | None:
    """Return the group of the ranks that have `folder` on the same disk as this one; None: all of
    them. All ranks call it together."""
    token = on_first_rank(lambda: secrets.token_hex(8), group=group)

    def mark_of(rank: int) -> Path:
        return folder / f".rank-{rank}-{token}"

    rank, num_ranks = dist.get_rank(group), dist.get_world_size(group)

    def leave_mark() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        mark_of(rank).touch()

    on_every_rank(leave_mark, group=group)
    seen = on_every_rank(
        lambda: tuple(other for other in range(num_ranks) if mark_of(other).exists()), group=group
    )
    on_every_rank(mark_of(rank).unlink, group=group)
    disks = sorted(set(seen))
    if len(disks) == 1:
        return None
    # every rank must make every group
    groups = {ranks: dist.new_group(ranks, backend="gloo", timeout=timeout) for ranks in disks}
    own: dist.ProcessGroup = groups[seen[rank]]
    return own


def on_each_disk(
    action: Callable[[], None], *, group: dist.ProcessGroup | None, disk: dist.ProcessGroup | None
) -> None:
    """Run `action` on the first rank of each disk; `disk`: the ranks of this one, None: all.

    Raises:
        CheckpointError: It failed on any of them; raised on every rank.
    """
    if disk is None:
        on_first_rank(action, group=group)
    else:
        on_every_rank(lambda: on_first_rank(action, group=disk), group=group)
