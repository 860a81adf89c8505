"""Ranks: the process group, and helpers for collective decisions.

Ranks find each other through torchrun's environment. A process started without it forms a group of
one, so the rest of the trainer never asks whether it is distributed.

A rank that fails alone leaves the other ranks waiting until a timeout that names neither rank nor
cause. So `on_first_rank` and `on_every_rank` exchange errors before any rank continues, and ranks
compare their settings and data before they train. A group of None means this process only.

`OncePerMachine` runs slow work, such as listing a bucket, on one rank per machine. The other ranks
wait without the limit of a collective, because copying data may take hours.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _get_default_store, _set_pg_timeout
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from torchtitan.base.errors import CheckpointError, ConfigError, DataError, UserError
from torchtitan.config.settings import CONFIG_FILE, literal, values_of
from torchtitan.mesh.faults import enable_recorder
from torchtitan.mesh.settings import CommConfig

STORE = "TORCHTITAN_STORE"
"""Set by the launcher of a job on one machine: the file in which its ranks meet."""
RUN_FILE = "TORCHTITAN_RUN_FILE"
"""Set by the launcher: the file in which a rank writes where the run's files are."""
END_FILE = "end"
"""Beside it: that the training of a machine's first rank has "ended", or with it its command has
"finished"."""
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
RENDEZVOUS = ("MASTER_ADDR", "MASTER_PORT")
SECONDS_FOR_RANK_0_TO_REPORT = 5


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Rank and world size of this process."""

    rank: int
    local_rank: int
    world_size: int


def read_rank_info(environ: Mapping[str, str]) -> RankInfo:
    """Read rank and world size from torchrun's variables; without them this is the only rank; raise
    ConfigError if variables are missing or invalid."""
    if not any(name in environ for name in VARIABLES):
        return RankInfo(rank=0, local_rank=0, world_size=1)
    try:
        rank, local_rank, world_size = (int(environ[name]) for name in VARIABLES)
    except (KeyError, ValueError):
        rank = local_rank = world_size = -1
    can_meet = world_size == 1 or all(name in environ for name in RENDEZVOUS)
    if not (0 <= rank < world_size and local_rank >= 0 and can_meet):
        values = {name: environ.get(name, "")[:60] for name in (*VARIABLES, *RENDEZVOUS)}
        raise ConfigError(
            f"RANK must be a number below WORLD_SIZE, LOCAL_RANK 0 or more, and several ranks need "
            f"MASTER_ADDR and MASTER_PORT, got {values}; start ranks with torchrun or "
            f"./run_train.sh"
        )
    return RankInfo(rank=rank, local_rank=local_rank, world_size=world_size)


def init_process_group(
    launch: RankInfo, *, device_type: str, settings: CommConfig, dump_folder: Path
) -> None:
    """Initialize the process group: NCCL on CUDA, gloo for host tensors and on CPU.

    Ranks of one machine listen on the loopback interface only, and meet in the launcher's file.
    """
    backend = "cpu:gloo,cuda:nccl" if device_type == "cuda" else "gloo"
    enable_recorder(settings, dump_folder=dump_folder, rank=launch.rank)
    store: dist.Store | None = None
    if launch.world_size == 1:
        store = dist.HashStore()
    elif STORE in os.environ:
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = dist.FileStore(f"{os.environ[STORE]}.{attempt}", launch.world_size)
    if os.environ.get("LOCAL_WORLD_SIZE", "1") == str(launch.world_size):
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
        for variable in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME") if loopback else ():
            os.environ.setdefault(variable, str(loopback))
    dist.init_process_group(
        backend,
        store=store,
        rank=launch.rank,
        world_size=launch.world_size,
        timeout=timedelta(seconds=settings.init_timeout_seconds),
    )


def end_process_group() -> None:
    """Destroy the process group, if there is one, so that this process may join another."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _clear_sharding_prop_cache()  # keyed by mesh; an equal mesh will have other groups


def tighten_timeout(seconds: int, *, groups: Iterable[dist.ProcessGroup]) -> None:
    """Set a shorter timeout of the default group and `groups`. Collective.

    The first step compiles, connects and reads. Later steps do not, so a rank that hangs can be
    detected much sooner.
    """
    dist.barrier()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    set_timeout(seconds, groups=groups)


def set_timeout(seconds: int, *, groups: Iterable[dist.ProcessGroup]) -> None:
    """Set the timeout of the default group and `groups`; new groups keep the backend's default."""
    # public since torch 2.14, which deprecates the private one
    set_group_timeout = getattr(dist, "set_timeout", _set_pg_timeout)
    for group in (None, *groups):
        set_group_timeout(timedelta(seconds=seconds), group)


def gather(tensor: Tensor) -> Tensor:
    """Return the tensors of all ranks, stacked along a new first dimension."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, tensor)
    return torch.stack(gathered)


def let_rank_0_report() -> None:
    """Sleep unless this is rank 0. If rank 0 has the same error, it prints it and exits, and the
    launcher ends this process, so that the user sees one message."""
    if os.environ.get("RANK", "0") != "0":
        signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the step loop's handler only records it
        time.sleep(SECONDS_FOR_RANK_0_TO_REPORT)


def leave(exit_code: int) -> None:
    """Flush output and end this process without running destructors.

    Destroying a gloo group while a peer still sends sometimes aborts (exit code -6), which would
    turn a finished run into a failed one. After an error, groups are not destroyed at all: that
    would wait for operations in flight, possibly with a rank that hangs.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(BrokenPipeError):  # the reader is gone; keep the exit code
            stream.flush()
    if exit_code == 0 and dist.is_initialized():
        dist.destroy_process_group()
    os._exit(exit_code)


MAX_DIFFERENCES = 3
"""Differences in a message."""


def check_alike(config: object) -> None:
    """Check that all ranks have the same settings. Collective. Raises ConfigError if they differ,
    on every rank, with the settings."""
    values = values_of(config)
    values.pop(CONFIG_FILE, None)  # the path may differ between machines
    if difference := _compare({".".join(path): literal(x) for path, x in values.items()}):
        raise ConfigError(
            f"all ranks must have the same settings, but {difference}; give all machines the same "
            f"file and options"
        )


def check_data_alike(fingerprint: Mapping[str, str]) -> None:
    """Check that all ranks read the same data, by fingerprint. Collective. Raises DataError if they
    differ, on every rank, with the entries."""
    if difference := _compare(fingerprint):
        raise DataError(
            f"all ranks must read the same data, but {difference}; give all machines the same "
            f"files, and delete a dataset_cache that was made from other files"
        )


def _compare(values: Mapping[str, str]) -> str | None:
    """Describe how ranks differ from rank 0; None if all ranks are equal."""
    first = [values]
    dist.broadcast_object_list(first)
    texts = [
        f"{name} is {values.get(name, 'unset')} there and {first[0].get(name, 'unset')} on rank 0"
        for name in dict.fromkeys([*first[0], *values])
        if first[0].get(name) != values.get(name)
    ]
    differences = [""] * dist.get_world_size()
    dist.all_gather_object(differences, ", ".join(texts[:MAX_DIFFERENCES]))
    ranks = [str(rank) for rank, difference in enumerate(differences) if difference]
    if not ranks:
        return None
    names = f"rank{'s' * (len(ranks) > 1)} {', '.join(ranks)}"
    return f"those of {names} differ from rank 0's: {differences[int(ranks[0])]}"


LONGEST = timedelta(days=7)
"""Timeout of a wait for another rank. If that rank dies, the launcher ends all ranks at once."""


class OncePerMachine:
    """Calls functions on one rank per machine and returns their results on all ranks.

    All ranks create it and call it with the same functions in the same order.
    """

    def __init__(self) -> None:
        # makes the keys of this instance unique
        self._run = _get_default_store().add(f"once/runs of {dist.get_rank()}", 1)
        self._numbers = count()

    def __call__(self, work: Callable[[], Any]) -> Any:
        """Call `work`, or wait for its result from another rank of this machine. Raises the
        UserError of `work`, here or there."""
        key = f"once/{self._run}/{next(self._numbers)}/{socket.gethostname()}"
        store = _get_default_store()
        if store.add(f"{key}/begun", 1) > 1:
            store.wait([key], LONGEST)
            result, problem = pickle.loads(store.get(key))
            if problem is not None:
                raise DataError(problem)
            return result
        try:
            result = work()
        except BaseException as error:
            text = (
                str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
            )
            problem = error.problem if isinstance(error, DataError) else text
            store.set(key, pickle.dumps((None, problem)))
            raise
        store.set(key, pickle.dumps((result, None)))
        return result


K = TypeVar("K")
T = TypeVar("T")
_LONGEST_REASON = 160
_EXPECTED = (OSError, ValueError, UserError)


def reason(error: BaseException) -> str:
    """Describe an error in one line; torch's messages continue with a stack and advice."""
    if isinstance(error, UserError):
        return str(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it ends too early" if isinstance(error, EOFError) else type(error).__name__
    line = f"{type(error).__name__}: {lines[0]}"
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."


def reasons(error: CheckpointError | CheckpointException) -> str:
    """Describe which ranks failed and why, without DCP's traceback."""
    if isinstance(error, CheckpointError):
        return str(error)
    ranks: dict[str, list[str]] = {}
    for rank, failure in error.failures.items():
        ranks.setdefault(reason(failure[0]), []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(group) > 1)} {', '.join(group)}: {why}" for why, group in ranks.items()
    )


def _attempt(
    action: Callable[[], T], *, group: dist.ProcessGroup | None
) -> tuple[T | None, str | None]:
    """Return the result of an action, or the message of an expected error."""
    try:
        return action(), None
    except _EXPECTED as error:
        if group is None and isinstance(error, UserError):
            raise
        return None, str(error)


def on_first_rank(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Run `action` on rank 0 and return its result on every rank; raise CheckpointError if the
    action raised a UserError or one of the file system, on every rank."""
    outcome: list[Any] = [None, None]
    if group is None or dist.get_rank(group) == 0:
        outcome = [*_attempt(action, group=group)]
    if group is not None:
        dist.broadcast_object_list(outcome, group_src=0, group=group)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    return outcome[0]


def on_every_rank(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> list[T]:
    """Run `action` on each rank and return all results in the order of ranks; raise CheckpointError
    if a rank raised a UserError or one of the file system, on every rank."""
    outcomes: list[Any] = [_attempt(action, group=group)]
    if group is not None:
        outcomes *= dist.get_world_size(group)
        dist.all_gather_object(outcomes, outcomes[0], group=group)
    messages = dict.fromkeys(message for _, message in outcomes if message is not None)
    if messages:
        raise CheckpointError("; ".join(messages))
    return [value for value, _ in outcomes]


def union(entries: Mapping[K, T], *, group: dist.ProcessGroup | None) -> dict[K, T]:
    """Return the union of all ranks' entries.

    Ranks with equal entries, such as those of one pipeline stage, send them once.
    """
    digest = hashlib.sha256(repr(sorted(entries.items(), key=repr)).encode()).hexdigest()
    digests = on_every_rank(lambda: digest, group=group)
    rank = 0 if group is None else dist.get_rank(group)
    is_first = rank == digests.index(digest)
    everyone = on_every_rank(lambda: dict(entries) if is_first else {}, group=group)
    return {key: value for part in everyone for key, value in part.items()}
