"""Which ranks share a local folder.

With an object store no shared disk is needed: each machine has a disk with the files of its ranks.
Host names do not tell (containers share a host, hosts share a disk), so each rank creates a file in
the folder, and ranks that see the same files share a disk.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from torchtitan.mesh.ranks import on_every_rank, on_first_rank


def find_disks(
    folder: Path, *, group: dist.ProcessGroup, timeout_seconds: int
) -> dist.ProcessGroup | None:
    """Return the group of ranks that share `folder` with this one; None if all do. Collective."""
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
    # every rank must create every group
    groups = {
        ranks: dist.new_group(ranks, backend="gloo", timeout=timedelta(seconds=timeout_seconds))
        for ranks in disks
    }
    own: dist.ProcessGroup = groups[seen[rank]]
    return own


def on_each_disk(
    action: Callable[[], None], *, group: dist.ProcessGroup | None, disk: dist.ProcessGroup | None
) -> None:
    """Run `action` on the first rank of each disk. Collective over `group`.

    Args:
        action: Function without arguments.
        group: All ranks. None: this process only.
        disk: Ranks that share this rank's disk. None: all of `group`.

    Raises:
        CheckpointError: The action failed on any disk; raised on every rank.
    """
    if disk is None:
        on_first_rank(action, group=group)
    else:
        on_every_rank(lambda: on_first_rank(action, group=disk), group=group)
