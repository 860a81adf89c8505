"""Ending a run when it is asked to: by a signal, or by its deadline.

A scheduler that wants its machines back sends a signal (SIGTERM, or SIGUSR1 where Slurm is told
to) to some or all ranks and kills them a little later; a person presses Ctrl-C. No rank may leave
on its own: the others would wait for it in their next collective. So a signal is only noted, and
the ranks exchange these notes in every step (`agreement.py`): all of them learn of it in the same
step, save together and end. Before the first step there is nothing to save, and a signal ends a
rank at once.

A rank that waits for data that do not come takes part in no step. It ends by itself: after the time
that other ranks would wait for it, or soon after it was asked to stop. Its main thread sees to that
while it waits for data workers; where it reads data itself, the thread of the signals does.

Python runs a signal's handler between two of its own instructions, which is too late for a process
that hangs in a collective. Here the C handler itself wakes a thread, so a second signal ends the
process whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist

from torchtitan.base.errors import StalledError, StoppedError, UserError
from torchtitan.base.log import amount, erase_line, is_terminal, note_in_file
from torchtitan.mesh.faults import exit_code_of

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDS_FOR_DATA = 10.0
"""How long data may still take on a rank that is asked to stop."""
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_OF_ONE_REQUEST = 1.0
"""A scheduler signals the launcher and the ranks, and the launcher passes it on: one request."""


class WaitInterrupted(Exception):  # noqa: N818 - no error
    """The only rank was asked to stop while it waited for data; its text says why."""


@dataclass
class _Wait:
    began: float
    limit: float
    describe: Callable[[], str]
    asked: float | None = None
    """When the request to stop was first seen."""


class StopRequest:
    """What this rank has been asked, by signals (`watch_signals`) or by the clock."""

    def __init__(
        self,
        *,
        clock: Callable[[], float] = time.monotonic,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self._clock, self._leave = clock, leave
        self._started = clock()
        self._seconds: int | None = None
        self._first_signal: float | None = None
        self.is_asked: Callable[[], bool] = lambda: False
        """Whether code of the user's own asks for the end."""
        self._deferring = False
        self._wait: _Wait | None = None
        # held while a signal is judged, so that none falls between set-up and the first step
        self._lock = threading.RLock()  # a session's handler may interrupt whoever holds it

    def end_after(self, seconds: int | None, *, started: float | None = None) -> None:
        """Ask for the end of the run so long after it `started`, by default when this request was
        made; None: never."""
        self._seconds = seconds
        self._started = self._started if started is None else started

    @property
    def is_signalled(self) -> bool:
        """Tell whether a signal has come."""
        return self._first_signal is not None

    def votes(self) -> list[int]:
        """Return what to sum over all ranks: 1 for a signal, for a deadline that is over, and for
        a callback."""
        late = self._seconds is not None and self._clock() - self._started >= self._seconds
        return [int(self.is_signalled), int(late), int(self.is_asked())]

    def defer(self) -> None:
        """From now on a signal is only noted: the step loop agrees on it with all ranks."""
        with self._lock:
            self._deferring = True

    @contextmanager
    def waiting(self, limit_seconds: float, *, describe: Callable[[], str]) -> Iterator[None]:
        """Let the wait for data inside end by `look`; `describe` says who owes them."""
        self._wait = _Wait(self._clock(), limit_seconds, describe)
        try:
            yield
        finally:
            self._wait = None

    def look(self) -> None:
        """End the wait for data if it is time; called while it lasts, by the thread that waits.

        Raises:
            StalledError: They have not come for too long.
            WaitInterrupted: This rank, the only one, was asked to stop.
            StoppedError: A rank of several was, a while ago: the others wait for it.
        """
        is_alone = dist.get_world_size() == 1
        error = self._complaint(patience=0 if is_alone else SECONDS_FOR_DATA)
        if isinstance(error, StoppedError) and is_alone:
            raise WaitInterrupted(describe(self.votes()))
        if error is not None:
            raise error

    def look_from_aside(self) -> None:
        """End this process where `look` should have ended the wait, and could not."""
        error = self._complaint(patience=SECONDS_FOR_DATA, late=2 * SECONDS_BETWEEN_LOOKS)
        if error is not None:
            note_in_file(str(error))
            os.write(2, f"{erase_line(sys.stderr)}{error}\n".encode())
            self._leave(exit_code_of(error, os.environ))

    def _complaint(self, *, patience: float, late: float = 0.0) -> UserError | None:
        wait, now = self._wait, self._clock() - late
        if wait is None:
            return None
        if reason := describe(self.votes()):
            wait.asked = wait.asked or now
            if now - wait.asked >= patience:
                return StoppedError(
                    f"stopped by {reason} while it waited for data: {wait.describe()}; nothing was "
                    f"saved since the last checkpoint"
                )
        if now - wait.began >= wait.limit:
            return StalledError(
                f"rank {dist.get_rank()} has waited {wait.limit:g} s for data, most of "
                f"comm.train_timeout_seconds (until the first step is done "
                f"comm.init_timeout_seconds): {wait.describe()}; start again to resume"
            )
        return None

    def on_signal(self, number: int) -> None:
        """Note a signal, or end this process: before `defer`, and on a second one."""
        name, now = signal.Signals(number).name, self._clock()
        with self._lock:
            first = self._first_signal
            if first is None:
                self._first_signal = now
            if first is None and not self._deferring:
                logger.warning("%s before the first step: nothing to save", name)
                self._leave(StoppedError.exit_code)
            elif first is None:
                logger.warning("%s: stopping after this step, or the next; again to quit", name)
            elif now - first >= SECONDS_OF_ONE_REQUEST:
                # no logging: the thread that hangs may hold its lock
                cursor = "\x1b[?25h" if is_terminal(sys.stderr) else ""  # a bar hides it
                line = f"{erase_line(sys.stderr)}{cursor}{name} again: quitting\n"
                os.write(2, line.encode())
                self._leave(128 + number)


def begin_together(stop: StopRequest) -> None:
    """Wait for all ranks, so that none meets a signal in set-up while others train.

    Raises:
        StoppedError: A rank has left on a signal that this one got too.
    """
    stop.defer()
    try:
        dist.barrier()
    except RuntimeError as error:
        if stop.is_signalled:
            raise StoppedError("stopped by a signal before the first step") from error
        raise


def describe(votes: Sequence[int]) -> str | None:
    """Say why the run stops, from the votes summed over all ranks; None where it goes on."""
    num_signalled, num_late, num_asked = votes
    if num_signalled:
        return f"a signal (to {amount(num_signalled, 'rank')})"
    if num_late:
        return "its deadline, checkpoint.save_before_seconds"
    return f"a callback (on {amount(num_asked, 'rank')})" if num_asked else None


@contextmanager
def watch_signals() -> Iterator[StopRequest]:
    """Take the signals that ask for an end, inside; call from the main thread."""
    request = StopRequest()
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    thread = threading.Thread(target=_pass_on, args=(reader, request), name="signals", daemon=True)
    thread.start()
    woken_before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    try:
        with _handling(_do_nothing):
            yield request
    finally:
        signal.set_wakeup_fd(woken_before)
        os.close(writer)  # ends the thread
        thread.join()


@contextmanager
def watch_session() -> Iterator[StopRequest]:
    """Do the same in a process that goes on after the run, a notebook say: what would end it raises
    KeyboardInterrupt instead. Only the main thread gets signals; in another one none is taken."""
    request = StopRequest(leave=_interrupt)
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    with _handling(lambda number, frame: request.on_signal(number)):
        yield request


def _interrupt(exit_code: int) -> None:
    raise KeyboardInterrupt


@contextmanager
def _handling(handler: Callable[[int, object], None]) -> Iterator[None]:
    before = {number: signal.signal(number, handler) for number in SIGNALS}
    try:
        yield
    finally:
        for number, each in before.items():
            signal.signal(number, each)


def _do_nothing(number: int, frame: object) -> None:
    """Stand in for the default, which would end the process; the thread does the work."""


def _pass_on(reader: int, request: StopRequest) -> None:
    while True:
        if not select.select([reader], [], [], SECONDS_BETWEEN_LOOKS)[0]:
            request.look_from_aside()
            continue
        if not (numbers := os.read(reader, 1)):
            break
        if numbers[0] in SIGNALS:  # other signals with a handler, SIGCHLD say, wake it too
            request.on_signal(numbers[0])
    os.close(reader)
