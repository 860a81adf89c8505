"""Faults: non-finite losses, ranks that hang, and the exit codes of a failed rank.

The loss and gradient norm of a step enter one reduced number (`optim.clip.global_norm`). All ranks
see, at the same point of the loop (`mesh/sync.py`), that it is not finite; no optimizer changes a
weight. Only then do the ranks exchange whose loss is not finite.

A rank that hangs is detected by the timeout of the other ranks' collectives:
`comm.train_timeout_seconds` in a step, `checkpoint.save_timeout_seconds` in a save. Shortly before
it a C thread of `faulthandler`, which needs no interpreter, writes all threads' stacks to the log.

torch's flight recorder keeps the newest `comm.trace_buf_size` collectives of each backend. NCCL
writes its own when one times out, and ends the process by SIGABRT, which the launcher takes for a
hang. A rank that ends with an error writes both. `torchtitan hang` reads the files.
"""

from __future__ import annotations

import faulthandler
import math
import os
import pickle
import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.distributed_c10d import _world

from torchtitan.base.errors import ConfigError, NonFiniteError, StoppedError, UserError
from torchtitan.mesh.settings import CommConfig

PART_OF_TIMEOUT = 0.9
"""Part of the timeout after which stacks are written, before other ranks give up on this one."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code of an error: a UserError's, 4 for a collective's timeout, else 1."""
    if isinstance(error, UserError):
        return error.exit_code
    return StoppedError.exit_code if is_timeout(error) else 1


def is_timeout(error: BaseException) -> bool:
    """Return whether `error` is a collective's timeout, by the messages of gloo, NCCL and store."""
    return _is_of_a_collective(error, "timed out waiting|collective operation timeout|wait timeout")


def is_communication_error(error: BaseException) -> bool:
    """Return whether a collective failed because another rank ended or hangs.

    gloo reports a closed connection or a timeout. Any other error, also NCCL's, may be the cause.
    """
    return is_timeout(error) or _is_of_a_collective(error, "connection (closed|reset)")


def _is_of_a_collective(error: BaseException, words: str) -> bool:
    has_others = os.environ.get("WORLD_SIZE", "1") != "1"
    is_match = re.search(words, str(error), re.IGNORECASE) is not None
    return is_match and has_others and isinstance(error, RuntimeError)


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Turn a SystemExit of custom code, which would look like a finished run, into an error.

    KeyboardInterrupt passes, since signals in a session raise it. Raises ConfigError that names the
    line that raised the exit.
    """
    try:
        yield
    except (Exception, CheckpointException, KeyboardInterrupt):  # DCP's is no Exception
        raise
    except BaseException as error:
        raise refused_exit(error) from error


def refused_exit(error: BaseException) -> ConfigError:
    """Return the error for custom code that tried to end the process."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(
        f"custom code must not end the process, but {error!r:.80} was raised in {at.name}, "
        f"{at.filename}:{at.lineno}; raise an Exception, or stop the run with a callback"
    )


def raise_if_nonfinite(norm: float, *, loss: Tensor, step: int) -> None:
    """Raise if the global gradient norm is not finite. Every rank passes the same `norm`, and its
    part of the loss. Raises NonFiniteError that names the step and the ranks whose loss is not
    finite."""
    if math.isfinite(norm):
        return
    losses: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    culprits = {rank: value for rank, value in enumerate(losses) if not math.isfinite(value)}
    values = ", ".join(f"{value} on rank {rank}" for rank, value in culprits.items())
    values = values or f"finite on every rank, and the gradient norm {norm}"
    raise NonFiniteError(
        f"step {step} must have a finite loss and gradient norm: the loss is {values}. The weights "
        f"were not changed; resume from the last checkpoint with checkpoint.mode = 'continue' and "
        f"a lower optimizer.lr, or start again in another dump_folder"
    )


@contextmanager
def dump_stacks_on_stall(
    file: Path, *, limit_seconds: float, on_step: Callable[[int], None]
) -> Iterator[Callable[[int], None]]:
    """Yield a function that calls `on_step`. If it is not called again for most of `limit_seconds`,
    append the stacks of all threads to `file`."""
    with file.open("a", encoding="utf-8") as log:

        def advance(step: int) -> None:
            faulthandler.dump_traceback_later(limit_seconds * PART_OF_TIMEOUT, file=log)
            on_step(step)

        try:
            yield advance
        finally:
            faulthandler.cancel_dump_traceback_later()


PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
GLOO, NCCL = "gloo_", "nccl_"
"""Prefixes of written records. Those that NCCL writes have `comm.save_traces_file_prefix`."""
NEWEST = 1000
"""Collectives in a record of gloo, of about 1 KB each."""


def enable_recorder(settings: CommConfig, *, dump_folder: Path, rank: int) -> None:
    """Enable torch's flight recorder before the first process group, and remove older records."""
    if not settings.trace_buf_size:
        return
    folder = dump_folder / settings.save_traces_folder
    prefix = str(folder / settings.save_traces_file_prefix)
    for file in (f"{prefix}{rank}", folder / f"{GLOO}{rank}", folder / f"{NCCL}{rank}"):
        Path(file).unlink(missing_ok=True)
    if torch.cuda.is_available():
        folder.mkdir(parents=True, exist_ok=True)  # NCCL does not create it
    # torch reads the environment when it creates a group
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(settings.trace_buf_size)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    os.environ[PREFIX] = prefix


def write_collectives() -> None:
    """Write the recorded collectives of this rank, each backend's to a file, if it recorded any."""
    prefix = os.environ.get(PREFIX)
    if not prefix or not dist.is_initialized() or dist.get_world_size() == 1:
        return
    rank, folder = dist.get_rank(), Path(prefix).parent
    record: dict[str, Any] = pickle.loads(torch._C._distributed_c10d._dump_fr_trace())
    record["entries"] = record["entries"][-NEWEST:]
    for group, ranks in _world.pg_group_ranks.items():  # gloo does not record them
        if isinstance(group, dist.ProcessGroup):  # this rank is a member
            description = {"desc": group.group_desc, "ranks": str(sorted(ranks))}
            record["pg_config"][group.group_name] = description
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{GLOO}{rank}").write_bytes(pickle.dumps(record))
    if torch.cuda.is_available():
        (folder / f"{NCCL}{rank}").write_bytes(torch._C._distributed_c10d._dump_nccl_trace())
