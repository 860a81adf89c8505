"""What one rank does for all, and what all do together: a failure anywhere is raised everywhere.

A rank that raises alone leaves the others waiting in their next collective until it times out. So
ranks exchange their errors before anybody goes on. A group of None is this process by itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.base.errors import CheckpointError

K = TypeVar("K")
T = TypeVar("T")
_LONGEST_REASON = 160
_EXPECTED = (OSError, ValueError, CheckpointError)


def reason(error: BaseException) -> str:
    """Say what went wrong in one line: torch's texts go on with its stack and with advice."""
    if isinstance(error, CheckpointError):
        return str(error)
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    if not lines:
        return "it ends too early" if isinstance(error, EOFError) else type(error).__name__
    line = f"{type(error).__name__}: {lines[0]}"
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]} ..."


def reasons(error: CheckpointError | CheckpointException) -> str:
    """Say which ranks failed and why, without the traceback that DCP adds."""
    if isinstance(error, CheckpointError):
        return str(error)
    ranks: dict[str, list[str]] = {}
    for rank, failure in error.failures.items():
        ranks.setdefault(reason(failure[0]), []).append(str(rank))
    return "; ".join(
        f"rank{'s' * (len(who) > 1)} {', '.join(who)}: {why}" for why, who in ranks.items()
    )


def on_first_rank(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> T:
    """Run `action` on rank 0 and return what it returned on every rank.

    Raises:
        CheckpointError: The action met a file-system error or a damaged file; raised on every rank.
    """
    outcome: list[Any] = [None, None]
    if group is None or dist.get_rank(group) == 0:
        try:
            outcome[0] = action()
        except _EXPECTED as error:
            outcome[1] = str(error)
    if group is not None:
        dist.broadcast_object_list(outcome, group_src=0, group=group)
    if outcome[1] is not None:
        raise CheckpointError(outcome[1])
    return outcome[0]


def on_every_rank(action: Callable[[], T], *, group: dist.ProcessGroup | None) -> list[T]:
    """Run `action` on each rank and return what every one returned, in the order of ranks.

    Raises:
        CheckpointError: A rank met a file-system error or a damaged file; raised on every rank.
    """
    value: T | None = None
    message: str | None = None
    try:
        value = action()
    except _EXPECTED as error:
        message = str(error)
    outcomes: list[Any] = [(value, message)]
    if group is not None:
        outcomes = [None] * dist.get_world_size(group)
        dist.all_gather_object(outcomes, (value, message), group=group)
    messages = dict.fromkeys(message for _, message in outcomes if message is not None)
    if messages:
        raise CheckpointError("; ".join(messages))
    return [value for value, _ in outcomes]


def union(own: Mapping[K, T], *, group: dist.ProcessGroup | None) -> dict[K, T]:
    """Return the entries of all ranks together.

    Ranks that hold the same, as those of one pipeline stage do, send it once.
    """
    digest = hashlib.sha256(repr(sorted(own.items(), key=repr)).encode()).hexdigest()
    digests = on_every_rank(lambda: digest, group=group)
    rank = 0 if group is None else dist.get_rank(group)
    is_first = rank == digests.index(digest)
    everyone = on_every_rank(lambda: dict(own) if is_first else {}, group=group)
    return {key: value for entries in everyone for key, value in entries.items()}
