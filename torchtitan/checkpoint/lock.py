"""One run at a time writes to a folder.

Two jobs with the same `dump_folder`, a restart beside a run thought dead, would delete each other's
drafts and mix their figures. So rank 0 locks a file there until its process ends; the kernel lets
go of the lock however that happens, so none is left behind for a person to remove.

It is a record lock of POSIX, not flock: that one would belong to the open file, and forked data
workers that outlive a killed trainer would keep it. This one belongs to the process alone, and
works over NFS too, as far as a server can know: of a host that died or was cut off it keeps the
lock until a lease has run out (version 4) or the host is back (version 3), and a host that lost its
lease may still write.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import platform
import time
from contextlib import ExitStack
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.ranks import on_first_rank

logger = logging.getLogger(__name__)
LOCK = ".lock"
SECONDS_TO_END = 5
"""How long a run that was just killed may take to be gone."""


def lock_folder(folder: Path, *, undo: ExitStack | None) -> None:
    """Take `folder` for this job, until `undo` or the end of rank 0's process; called by all ranks
    together.

    Raises:
        CheckpointError: Another run is writing to it, or it cannot be written to.
    """
    file = on_first_rank(lambda: hold(folder), group=dist.group.WORLD)
    if dist.get_rank() == 0 and undo is not None:
        undo.callback(os.close, file)  # which gives the lock back


def hold(folder: Path) -> int:
    """Take `folder` for this process until it ends, or closes the file that is returned."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + SECONDS_TO_END
    while not _try_lock(file, folder=folder):
        if time.monotonic() > deadline:
            holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            raise CheckpointError(
                f"job.dump_folder must belong to one run at a time, and another one is writing to "
                f"{folder} now: {holder}; wait for its end or end it, or choose another "
                f"--job.dump_folder"
            )
        time.sleep(0.1)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on host {platform.node()}\n".encode(), 0)
    return file


def _try_lock(file: int, *, folder: Path) -> bool:
    """Tell whether the lock is ours now, or cannot be had by anybody."""
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return False
        logger.warning(
            "%s cannot be locked (%s): nothing keeps two runs from writing to it at once",
            folder,
            error.strerror,
        )
    return True
