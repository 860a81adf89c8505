"""Stop a run early: on a signal, at its deadline, or when a callback asks.

A scheduler that needs its machines sends a signal (SIGTERM; in Slurm also SIGUSR1) to some or all
ranks and kills them a little later; a user presses Ctrl-C. No rank may leave on its own: the
other ranks would wait for it in their next collective. So a rank records the signal, and the ranks
exchange these records in every step (`sync.py`): all of them learn of it in the same step, save
together and end. Before the first step there is nothing to save, and a signal ends a rank at once.

A rank that waits for data takes part in no step. An alarm ends the wait before the other ranks'
collectives time out; if this is the only rank, soon after a signal.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch.distributed as dist

from torchtitan.base.errors import StalledError, StoppedError
from torchtitan.base.log import erase_line, is_terminal, plural

logger = logging.getLogger(__name__)
PART_FOR_DATA = 0.8
"""Part of the collectives' timeout. Ending the wait frees frames that faulthandler may read."""
STARTED = "TORCHTITAN_STARTED"
"""Set by the launcher: when it started, by the monotonic clock. torchrun may restart the ranks; the
job's time limit counts from here."""
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDS_OF_ONE_REQUEST = 1.0
"""A scheduler signals the launcher and the ranks, and the launcher passes it on: one request."""


PR_SET_PDEATHSIG = 1  # linux/prctl.h
SECONDS_FOR_DATA = 5.0
"""How long data may still take on the only rank once it is asked to stop."""


class WaitInterrupted(Exception):  # noqa: N818 - no error
    """A signal came while the only rank waited for data."""


class _WaitEnded(BaseException):
    """Raised in the code that produces data, which must not catch it."""


class StopRequest:
    """Requests to stop this rank, by signals (`watch_signals`) or by the clock."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], None] = os._exit,
        takes_signals: bool = False,
    ) -> None:
        self.data_timeout_seconds = 300.0
        """Current timeout of the other ranks' collectives."""
        self._clock, self._leave, self._takes_signals = clock, leave, takes_signals
        self._deadline: float | None = None
        self._first_signal: float | None = None
        self._defers = self._waits_alone = self._is_over = False
        self._replaced: dict[signal.Signals, Any] | None = None

    def end_after(self, seconds: int | None, *, started: float | None = None) -> None:
        """Stop the run this many seconds after it `started`, by default now. None: no limit."""
        started = self._clock() if started is None else started
        self._deadline = None if seconds is None else started + seconds

    @property
    def is_signalled(self) -> bool:
        """Return whether a signal has come."""
        return self._first_signal is not None

    def finish(self) -> None:
        """Ignore signals from now on: training has ended, and everything is saved."""
        self._is_over = True

    def votes(self) -> list[int]:
        """Return what to sum over all ranks: 1 for a signal, and for a deadline that is over."""
        is_late = self._deadline is not None and self._clock() >= self._deadline
        return [int(self.is_signalled), int(is_late)]

    def defer(self) -> None:
        """From now on only note a signal: the step loop agrees on it with all ranks."""
        self._defers = True
        if self._takes_signals and self._replaced is None:
            self.install()

    def install(self) -> None:
        """Handle the signals of this process. Until then they have their default effect."""
        handlers = {**dict.fromkeys(SIGNALS, self.on_signal), signal.SIGALRM: _end_wait}
        self._replaced = {number: signal.signal(number, h) for number, h in handlers.items()}

    def uninstall(self) -> None:
        """Restore the handlers that `install` replaced."""
        for number, handler in (self._replaced or {}).items():
            signal.signal(number, handler)
        self._replaced = None

    @contextmanager
    def waiting_for_data(self) -> Iterator[None]:
        """Limit the wait for data inside to most of `data_timeout_seconds`; after a signal to the
        only rank to `SECONDS_FOR_DATA`.

        Raises StalledError if no data came in time. Raises WaitInterrupted if this rank, the only
        one, was asked to stop.
        """
        limit = PART_FOR_DATA * self.data_timeout_seconds
        if self._replaced is not None:
            self._waits_alone = dist.get_world_size() == 1
            is_asked = self._waits_alone and self.is_signalled
            signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_DATA if is_asked else limit)
        try:
            yield
        except _WaitEnded as ended:
            if self._waits_alone and self.is_signalled:
                raise WaitInterrupted from None
            raise StalledError(
                f"rank {dist.get_rank()} waited {limit:g} s for data, most of "
                f"comm.train_timeout_seconds (comm.init_timeout_seconds until the first step is "
                f"done): {ended}; run the same command to resume"
            ) from None
        finally:
            if self._replaced is not None:  # without handlers, a timer is the caller's
                signal.setitimer(signal.ITIMER_REAL, 0)
            self._waits_alone = False

    def on_signal(self, number: int, frame: FrameType | None = None) -> None:
        """Handle a signal: note the first one, leave on a second one and before `defer`."""
        name, now = signal.Signals(number).name, self._clock()
        if self._is_over:
            return
        if self._first_signal is None:
            self._first_signal = now
            if self._defers:
                logger.warning("%s: stopping after this step, or the next; again to quit", name)
                if self._waits_alone:
                    signal.setitimer(signal.ITIMER_REAL, SECONDS_FOR_DATA)
            else:
                logger.warning("%s before the first step: nothing to save", name)
                self._leave(StoppedError.exit_code)
        elif now - self._first_signal >= SECONDS_OF_ONE_REQUEST:
            cursor = "\x1b[?25h" if is_terminal(sys.stderr) else ""  # a progress bar hides it
            os.write(2, f"{erase_line(sys.stderr)}{cursor}{name} again: quitting\n".encode())
            self._leave(128 + number)


def _end_wait(number: int, frame: FrameType | None) -> None:
    """Raise in the main thread, which waits for data workers or runs the dataset."""
    if workers := multiprocessing.active_children():
        pids = ", ".join(str(worker.pid) for worker in workers)
        raise _WaitEnded(f"no data from its data workers (processes {pids})")
    stack = traceback.extract_stack(frame)
    custom = [f for f in stack if not f.filename.startswith((sys.prefix, sys.base_prefix))]
    at = (custom or stack)[-1]
    raise _WaitEnded(f"the dataset is still in {at.name}, {at.filename}:{at.lineno}")


def sync_before_training(stop: StopRequest) -> None:
    """Wait for all ranks, so that no rank gets a signal in set-up while others train; raise
    StoppedError if a rank has left on a signal that this one got too."""
    stop.defer()
    try:
        dist.barrier()
    except RuntimeError as error:
        if stop.is_signalled:
            raise StoppedError("stopped by a signal before the first step") from error
        raise


def end_with_launcher(environ: Mapping[str, str]) -> None:
    """Ask Linux for a SIGTERM when the launcher dies, which would leave its ranks behind."""
    if STARTED in environ and sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def launcher_started(environ: Mapping[str, str]) -> float | None:
    """Return when the launcher started, by the monotonic clock; None without a launcher."""
    return float(environ[STARTED]) if STARTED in environ else None


def stop_reason(votes: Sequence[int]) -> str | None:
    """Return why the run stops, from the votes summed over all ranks; None if it does not."""
    num_signalled, num_late, num_asked = votes
    if num_signalled:
        return f"a signal (to {plural(num_signalled, 'rank')})"
    if num_late:
        return "its deadline, job.time_limit_seconds"
    return f"a callback (on {plural(num_asked, 'rank')})" if num_asked else None


@contextmanager
def watch_signals(*, leave: Callable[[int], None] = os._exit) -> Iterator[StopRequest]:
    """Handle signals while the context is open. `leave` ends the process with an exit code.

    Only the main thread receives signals; other threads handle nothing.
    """
    is_main = threading.current_thread() is threading.main_thread()
    request = StopRequest(leave=leave, takes_signals=is_main)
    # Several ranks wait for each other during set-up, in C++, where no handler of Python runs.
    # They keep the default handlers, which end a process at once, until `defer`.
    if is_main and os.environ.get("WORLD_SIZE", "1") == "1":
        request.install()
    try:
        yield request
    finally:
        request.uninstall()


def interrupt(exit_code: int) -> None:
    """Raise KeyboardInterrupt: a `leave` for processes that continue, such as a notebook."""
    raise KeyboardInterrupt
