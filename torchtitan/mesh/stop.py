"""Ending a run when it is asked to: by a signal, or by its deadline.

A scheduler that wants its machines back sends a signal (SIGTERM, or SIGUSR1 where Slurm is told
to) to some or all ranks and kills them a little later; a person presses Ctrl-C. No rank may leave
on its own: the others would wait for it in their next collective. So a signal is only noted, and
the ranks exchange these notes in every step (`agreement.py`): all of them learn of it in the same
step, save together and end. Before the first step there is nothing to save, and a signal ends a
rank at once.

Python runs a signal's handler between two of its own instructions, which is too late for a process
that hangs in a collective. Here the C handler itself wakes a thread, so a second signal ends the
process whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torchtitan.base.errors import StoppedError
from torchtitan.base.log import amount, erase_line, is_terminal

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
SECONDS_OF_ONE_REQUEST = 1.0
"""A scheduler signals the launcher and the ranks, and the launcher passes it on: one request."""


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
    while numbers := os.read(reader, 1):
        if numbers[0] in SIGNALS:  # other signals with a handler, SIGCHLD say, wake it too
            request.on_signal(numbers[0])
    os.close(reader)
