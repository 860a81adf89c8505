"""Faults that concern all ranks at once.

All ranks alike find that a step's loss or gradient norm is not finite, since both enter one reduced
figure (`optim.clip.global_norm`), and then no optimizer changes a weight. Only then do the ranks
spend time to tell each other what they saw.

A rank that hangs in a step is found by the timeout of the step's collectives. A save has no such
limit, since storage may be slow: there each rank keeps counting in the job's store while it works,
and a rank whose count stands still hangs. Rank 0 watches all others, and they watch rank 0, so that
the store gets few requests per second from any number of ranks.

What a rank that hangs was doing is in its log: shortly before the others give up on it, a thread of
C, which needs no interpreter, writes down the stacks of all threads there.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import math
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager
from pathlib import Path

import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException

from torchtitan.base.errors import ConfigError, NonFiniteError, StalledError, UserError
from torchtitan.mesh.verdict import HUNG, STOPPED

logger = logging.getLogger(__name__)
BEATS = 10
"""Signs of life within the time after which a silent rank counts as hung."""


PART_OF_TIMEOUT = 0.9
"""Stacks are written before others give up on this rank: they may be killed with it."""
PR_SET_PDEATHSIG = 1


class PeerError(RuntimeError):
    """Another rank hangs; started again, the run resumes."""


class Pulse:
    """This rank's sign of life and what is known of the others', in `store`.

    A rank hangs if it gives none for `limit_seconds`. The count is made by a thread of its own: it
    goes on while a rank writes to slow storage, and stops with the process.
    """

    def __init__(
        self, store: dist.Store | None, *, rank: int, world_size: int, limit_seconds: float
    ) -> None:
        self._store, self._rank, self._limit = store, rank, limit_seconds
        self._peers = range(1, world_size) if rank == 0 else range(1)
        self._seen: dict[int, float] = {}
        """When each rank that is watched last counted on."""

    @contextmanager
    def beating(self) -> Iterator[None]:
        """Show that this rank lives, and watch others, while inside."""
        if self._store is None or not self._peers:
            yield
            return
        seen = self._seen = dict.fromkeys(self._peers, time.monotonic())
        ended = threading.Event()
        threading.Thread(
            target=self._beat, args=(self._store, seen, ended), name="pulse", daemon=True
        ).start()
        try:
            yield
        finally:
            self._seen = {}
            ended.set()

    def _beat(self, store: dist.Store, seen: dict[int, float], ended: threading.Event) -> None:
        # only into `seen`: an answer that comes after the save must not look like a silent rank
        counts: dict[int, int] = {}
        while not ended.is_set():
            try:
                store.add(f"pulse/{self._rank}", 1)
                for peer in self._peers:
                    count = store.add(f"pulse/{peer}", 0)
                    if counts.get(peer) != count:
                        counts[peer], seen[peer] = count, time.monotonic()
            except RuntimeError as error:
                # whoever holds it is gone or hangs: rank 0 or the launcher, found by the silence
                logger.warning("the job's store gives no answer: %s", error)
                return
            ended.wait(self._limit / BEATS)

    def complaint(self, *, seconds: float, awake_since: float = 0.0) -> str:
        """Say which ranks were silent for so long, not counting the time before `awake_since`;
        "" if none was."""
        limit = time.monotonic() - seconds
        silent = [str(rank) for rank, seen in self._seen.items() if max(seen, awake_since) < limit]
        if not silent:
            return ""
        return (
            f"no sign of life from rank{'s' * (len(silent) > 1)} {', '.join(silent)} for "
            f"{seconds:g} s while a checkpoint was saved (comm.train_timeout_seconds is "
            f"{self._limit:g}): hung, stopped or cut off; start again to resume from the last "
            f"checkpoint"
        )

    def suspicion(self) -> str:
        """Say which ranks have been silent for long enough to be why something else failed."""
        return self.complaint(seconds=self._limit / 2)

    def watch(self, save: Future[None]) -> None:
        """Wait until `save` is done, which is `beating`.

        Raises:
            PeerError: Names the ranks that hang.
        """
        interval = self._limit / BEATS
        awake_since = now = time.monotonic()
        while wait([save], timeout=interval).not_done:
            before, now = now, time.monotonic()
            if now - before > 3 * interval:
                awake_since = now  # this rank was stopped itself, and maybe the whole job
            if complaint := self.complaint(seconds=self._limit, awake_since=awake_since):
                raise PeerError(complaint)


def exit_code_of(error: BaseException, environ: Mapping[str, str]) -> int:
    """Return what a rank leaves with: an error's own code, or 1; where it has waited too long for
    another one, or for data, what its launcher, if it has one, starts again by."""
    if isinstance(error, UserError) and not isinstance(error, StalledError):
        return error.exit_code
    # torch has no class for it: the words of gloo, NCCL's watchdog and the store
    words = "timed out waiting|collective operation timeout|wait timeout"
    is_peer = isinstance(error, PeerError) or (
        isinstance(error, RuntimeError) and re.search(words, str(error), re.IGNORECASE) is not None
    )
    is_hang = isinstance(error, StalledError) or (is_peer and environ.get("WORLD_SIZE", "1") != "1")
    if not is_hang:
        return 1
    return HUNG if "TORCHELASTIC_RUN_ID" in environ else STOPPED


@contextmanager
def refuse_exits() -> Iterator[None]:
    """Turn what is no `Exception`, as SystemExit in code of the user's own, into an error: it would
    end the process without a word, and with the exit code of a run that is done.

    KeyboardInterrupt passes, since a session's signals raise it.

    Raises:
        ConfigError: Names the line that raised it.
    """
    try:
        yield
    except (Exception, CheckpointException, KeyboardInterrupt):  # DCP's is no Exception
        raise
    except BaseException as error:
        raise refused_exit(error) from error


def refused_exit(error: BaseException) -> ConfigError:
    """Return the error of code that may not end the process."""
    at = traceback.extract_tb(error.__traceback__)[-1]
    return ConfigError(
        f"your own code must not end the process, but {error!r:.80} was raised in {at.name}, "
        f"{at.filename}:{at.lineno}; raise an Exception, or ask for the end by a callback"
    )


def raise_if_nonfinite(norm: float, *, loss: Tensor, step: int) -> None:
    """Stop the run where the global gradient norm is not finite.

    `loss` is this rank's share of the loss. Every rank must call this with the same `norm`.

    Raises:
        NonFiniteError: Names the step and the ranks whose own loss is not finite.
    """
    if math.isfinite(norm):
        return
    losses: list[float] = [0.0] * dist.get_world_size()
    dist.all_gather_object(losses, loss.item())
    culprits = {rank: value for rank, value in enumerate(losses) if not math.isfinite(value)}
    if culprits:
        seen = "the loss is " + ", ".join(f"{v} on rank {rank}" for rank, v in culprits.items())
    else:
        seen = f"the loss is finite on every rank, but the gradient norm is {norm}"
    raise NonFiniteError(
        f"step {step} must have a finite loss and gradient norm: {seen}. The weights were not "
        f"changed; go on from the last checkpoint with checkpoint.mode = 'continue' and a lower "
        f"optimizer.lr, or start anew in another dump_folder"
    )


@contextmanager
def stacks_of_stalls(
    file: Path, *, limit_seconds: float, on_step: Callable[[int], None]
) -> Iterator[Callable[[int], None]]:
    """Yield what calls `on_step` with each step. Where it is not called again for most of
    `limit_seconds`, the stacks of all threads are added to `file`."""
    with file.open("a", encoding="utf-8") as log:

        def go_on(step: int) -> None:
            faulthandler.dump_traceback_later(limit_seconds * PART_OF_TIMEOUT, file=log)
            on_step(step)

        try:
            yield go_on
        finally:
            faulthandler.cancel_dump_traceback_later()


def end_with_launcher() -> None:
    """Have this process killed when its launcher dies: the nodes that are left start without it,
    and it would write to the same folder."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
