"""A lock that lets only one run at a time write to a folder.

Two jobs with the same `dump_folder`, e.g. a restart while the old run still lives, would delete
each other's drafts and mix their figures. So rank 0 locks a file there; the kernel releases the
lock however the process ends. It is a POSIX record lock, which belongs to the process: forked data
workers that outlive a killed trainer would keep flock's. Over NFS the lock of a host that died is
kept until its lease expires.
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
from torchtitan.mesh.ranks import on_first_rank

logger = logging.getLogger(__name__)
LOCK = ".lock"
SECONDS_TO_END = 5
"""Time that a run that was just killed may take to end."""


def lock_folder(folder: Path, *, cleanup: ExitStack) -> None:
    """Lock `folder` for this job until `cleanup` is closed or rank 0's process ends. Collective;
    raise CheckpointError if another run is writing to the folder, or it is not writable."""
    file = on_first_rank(lambda: hold(folder), group=dist.group.WORLD)
    if dist.get_rank() == 0:
        cleanup.callback(os.close, file)  # releases the lock


def hold(folder: Path) -> int:
    """Lock `folder` until this process ends or closes the returned file descriptor."""
    folder.mkdir(parents=True, exist_ok=True)
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
    deadline = time.monotonic() + SECONDS_TO_END
    while True:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EAGAIN):
                logger.warning("%s cannot be locked: two runs could write there: %s", folder, error)
                break
            if time.monotonic() > deadline:
                holder = os.pread(file, 1000, 0).decode(errors="replace").strip() or "unknown"
                os.close(file)
                raise CheckpointError(
                    f"job.dump_folder: another run is writing to {folder}: {holder}; wait for its "
                    f"end, end it, or choose another --job.dump_folder"
                ) from None
        time.sleep(0.1)
    os.ftruncate(file, 0)
    os.pwrite(file, f"process {os.getpid()} on host {platform.node()}\n".encode(), 0)
    return file
