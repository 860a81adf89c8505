"""The process group: who I am, how long to wait for the others, and how to leave.

Ranks find each other through torchrun's environment. A process that was started alone has none of
it and forms a group of one, so that the rest of the trainer never asks whether it is distributed.
"""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import (
    _get_default_group,
    _get_default_store,
    _set_pg_timeout,
)
from torch.distributed.rendezvous import rendezvous
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchtitan.base.errors import ConfigError
from torchtitan.mesh.recorder import enable_recorder
from torchtitan.mesh.settings import CommConfig

VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
MEETING_POINT = ("MASTER_ADDR", "MASTER_PORT")
REPORTS, RAN_OUT, REPORTED = "reports", "out of memory", "reported"
SECONDS_TO_REPORT = 2.0
"""How long other ranks may take to ask who reports an error."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """This process's place in the job."""

    rank: int
    local_rank: int
    world_size: int


def read_launch(environ: Mapping[str, str]) -> Launch:
    """Read this process's place from torchrun's variables; alone if there are none.

    Raises:
        ConfigError: Some of the variables are set and others are not, or they make no sense.
    """
    present = [name for name in VARIABLES if name in environ]
    if not present:
        return Launch(rank=0, local_rank=0, world_size=1)
    try:
        rank, local_rank, world_size = (int(environ[name]) for name in VARIABLES)
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{', '.join(VARIABLES)} must all be numbers, or all be unset for one process; got "
            f"{ {name: environ.get(name) for name in VARIABLES} }; start ranks with torchrun "
            f"or ./run_train.sh"
        ) from error
    missing = [name for name in MEETING_POINT if name not in environ]
    port = environ.get("MASTER_PORT", "1")
    if not (port.isascii() and port.isdecimal() and 0 <= int(port[:6]) < 2**16) or local_rank < 0:
        raise ConfigError(
            f"MASTER_PORT must be a port, 0 to 65535, and LOCAL_RANK 0 or more, got {port[:60]!r} "
            f"and {local_rank}; start ranks with torchrun or ./run_train.sh"
        )
    if not 0 <= rank < world_size or (world_size > 1 and missing):
        raise ConfigError(
            f"RANK must be below WORLD_SIZE, and several ranks need {' and '.join(MEETING_POINT)} "
            f"to meet; got RANK {rank}, WORLD_SIZE {world_size}"
            + (f" without {' and '.join(missing)}" if missing else "")
            + "; start ranks with torchrun or ./run_train.sh"
        )
    return Launch(rank=rank, local_rank=local_rank, world_size=world_size)


def init_process_group(
    launch: Launch, *, device_type: str, settings: CommConfig, dump_folder: Path
) -> None:
    """Join the job's group: NCCL (with gloo for host tensors) on CUDA, gloo on CPU."""
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    enable_recorder(settings, dump_folder=dump_folder, rank=launch.rank)
    timeout = timedelta(seconds=settings.init_timeout_seconds)
    dist.init_process_group(
        backend,
        store=_store_of_run(launch, timeout=timeout),
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timeout,
    )


def _store_of_run(launch: Launch, *, timeout: timedelta) -> dist.Store:
    """Return a store that no earlier run of these processes has written to."""
    if launch.world_size == 1:
        return dist.HashStore()
    place = tuple(os.environ[name] for name in MEETING_POINT)
    store = _store_of_job(_Meeting(launch=launch, place=place, timeout=timeout))
    store.set_timeout(timeout)
    # where the last run's groups met, this one's would find the addresses of the dead
    number = store.add(f"runs of rank {launch.rank}", 1)
    return dist.PrefixStore(f"run {number}", store)


@dataclass(frozen=True, kw_only=True)
class _Meeting:
    launch: Launch
    place: tuple[str, ...]
    timeout: timedelta = field(compare=False)
    """How long to wait for the other ranks; a run that sets another limit meets all the same."""


@cache  # as long as the process: whoever is first at the next run would meet a store that closes
def _store_of_job(meeting: _Meeting) -> dist.Store:
    place = {"rank": meeting.launch.rank, "world_size": meeting.launch.world_size}
    store: dist.Store = next(rendezvous("env://", **place, timeout=meeting.timeout))[0]
    return store


def end_process_group() -> None:
    """Leave the job's group, if this process is in one, so that it may join another."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # it remembers meshes, and an equal mesh has other groups next


def tighten_timeout(seconds: int, *, groups: Iterable[dist.ProcessGroup]) -> None:
    """Give the default group and `groups` a new timeout, once all ranks have arrived here.

    The first step of a start compiles, connects and reads; later ones do not, so a rank that
    hangs can be found much sooner.
    """
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    set_timeout(seconds, groups=groups)


def set_timeout(seconds: int, *, groups: Iterable[dist.ProcessGroup]) -> None:
    """Give the default group and `groups` a timeout; a new group has its backend's own."""
    # public from torch 2.14 on, which warns where the private one is called
    set_group_timeout = getattr(dist, "set_timeout", _set_pg_timeout)
    for group in (None, *groups):
        set_group_timeout(timedelta(seconds=seconds), group)


def seconds_to_wait() -> float:
    """Return how long other ranks wait for this one in a collective by now."""
    group = _get_default_group()
    waits: timedelta = group._get_backend(torch.device("cpu")).options._timeout
    return waits.total_seconds()


def gather(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def job_store() -> dist.Store:
    """Return what all ranks of the job share, without waiting for each other."""
    return _get_default_store()


def is_first_to_report() -> bool:
    """Tell whether this rank is the first of the job to report an error, without waiting."""
    return is_first(REPORTS)


def begin_report() -> bool:
    """Tell whether this rank is the first that is out of memory, and so reports it for all.

    Errors are counted apart: neither report may take the other's place.
    """
    return is_first(RAN_OUT)


def end_report() -> None:
    """Let ranks that wait for the report of `begin_report` go on."""
    with suppress(dist.DistError):
        job_store().set(REPORTED, "1")


def await_report(seconds: float) -> None:
    """Wait until a report that another rank has begun is out: when one rank leaves, a launcher ends
    the others. Return at once if there is none.

    `seconds`: the longest to wait.
    """
    with suppress(dist.DistError):
        if job_store().add(RAN_OUT, 0):
            job_store().wait([REPORTED], timedelta(seconds=seconds))


def is_first(counter: str) -> bool:
    """Tell whether this rank is the first of the job to ask by this name, without waiting."""
    try:
        return job_store().add(counter, 1) == 1
    except dist.DistError:  # the store went with rank 0: better said twice than never
        return True


def await_reports() -> None:
    """Let others ask `is_first_to_report`, where this process holds the store; not for long."""
    if not dist.is_initialized() or dist.get_rank() != 0:
        return
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return
    deadline = time.monotonic() + SECONDS_TO_REPORT
    while job_store().add(REPORTS, 0) < dist.get_world_size() and time.monotonic() < deadline:
        time.sleep(0.02)


def leave(exit_code: int) -> None:
    """End this process without running destructors, once its output is flushed.

    A gloo group that is torn down while a peer still sends aborts now and then (exit code -6),
    which would turn a finished run into a failed one. After an error groups are not even taken
    down: that waits for what is in flight in them, maybe with a peer that hangs.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # whoever read it is gone: the exit code must not be lost
            stream.flush()
    if exit_code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(exit_code)
