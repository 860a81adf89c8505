"""Programs that come with a model, run in a child process under limits.

A chat template is a program, and so, in effect, is a tokenizer file with its regular expressions.
Either can run for ever, take all memory or break the library that runs it, by mistake or meant so.
Nothing inside a process ends that: a power of large numbers and a regular expression hold the
interpreter until they are done, and counting a template's loops leaves its filters, methods and
operators. So they run in a child, which the kernel ends when what it was given takes too much
processor time (not time on the clock: a machine may be busy) or memory; its parent then says so.

The child is started when it is first needed, by a new interpreter, so that it has none of a
trainer's CUDA and threads. It knows nothing of signals to the job, ends with its parent, and after
a minute without work; then the next work starts another. All programs of a kind share one.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from typing import Any

Loaded = tuple[Callable[[Any], Any], Any]
"""What runs an item, and what is to be known of the program."""
SECONDS_IDLE = 60


class ForeignError(Exception):
    """A program failed, or was ended, on the item `index`; the text says how."""

    def __init__(self, reason: str, *, index: int = 0) -> None:
        super().__init__(reason)
        self.index = index


@dataclass(frozen=True)
class Limits:
    """What a program may take for one item, and for being loaded."""

    seconds: float
    gib: int


class Program:
    """A program of a stranger, by the function that loads it and the text it is loaded from.

    `loader` is the name of a function, `package.module:function`, from `source` to `Loaded`, whose
    second part is `about`. A `trusted` one, which came with this package, runs in this process.

    Raises ForeignError when it cannot be loaded.
    """

    def __init__(
        self, loader: str, source: bytes, *, limits: Limits, trusted: bool = False
    ) -> None:
        self._loader, self._source, self._limits = loader, source, limits
        self._run: Callable[[Any], Any] | None = None
        if trusted:
            with _told(0):
                self._run, self.about = _load(loader, source)
        else:
            (self.about,) = self._ask([])

    def run(self, items: Sequence[Any], *, seconds: float | None = None) -> list[Any]:
        """Return what each item gives; raise ForeignError for the first that fails.

        `seconds`: for one item, in the place of the limits'.
        """
        if self._run is None:
            return self._ask(items, seconds=seconds)[1:]
        results = []
        for index, item in enumerate(items):
            with _told(index):
                results.append(self._run(item))
        return results

    def _ask(self, items: Sequence[Any], *, seconds: float | None = None) -> list[Any]:
        """Return what is known of the program, and what each item gives."""
        child = _child(self._loader, self._limits)
        return child.ask(self._source, items, seconds=seconds or self._limits.seconds)


@contextlib.contextmanager
def _told(index: int) -> Iterator[None]:
    try:
        yield
    # whatever it raises is a fault of it, or of what it was given
    except Exception as error:
        raise ForeignError(_reason(error), index=index) from error


def _reason(error: BaseException) -> str:
    return str(error) or type(error).__name__


def _load(loader: str, source: bytes) -> Loaded:
    module, _, function = loader.partition(":")
    loaded: Loaded = getattr(import_module(module), function)(source)
    return loaded


@cache
def _child(loader: str, limits: Limits) -> _Child:
    return _Child(loader, limits)


class _Child:
    """The process of one kind of programs, started when there is work for it."""

    def __init__(self, loader: str, limits: Limits) -> None:
        self._loader, self._limits = loader, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._known: set[bytes] = set()
        self._last_answered = 0.0

    def ask(self, source: bytes, items: Sequence[Any], *, seconds: float) -> list[Any]:
        """Load a program unless that was done, and run it on items; raise ForeignError."""
        with self._lock:
            replies: list[Any] = []
            try:
                self._send(source, items, seconds)
                while len(replies) <= len(items):
                    fine, value = self._receive()
                    if not fine:
                        break
                    self._known.add(source)
                    replies.append(value)
                self._last_answered = time.monotonic()
            except BaseException as error:
                # what else it says answers no later question
                code = self._end()
                if not isinstance(error, EOFError | BrokenPipeError | pickle.UnpicklingError):
                    raise
                fine, value = False, self._how_it_ended(code, seconds)
        if not fine:
            raise ForeignError(value, index=max(len(replies) - 1, 0))
        return replies

    def _send(self, source: bytes, items: Sequence[Any], seconds: float) -> None:
        process = self._process
        # it may have left for want of work, but not so soon that it leaves now
        quiet = time.monotonic() - self._last_answered
        if process is None or process.poll() is not None or quiet > SECONDS_IDLE / 2:
            self._end()
            self._known.clear()
            code = (
                f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import serve; "
                f"serve({self._loader!r}, gib={self._limits.gib})"
            )
            process = self._process = subprocess.Popen(
                [sys.executable, "-c", code],
                # the stacks of numpy's threads, one per core, would count as its memory
                env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        assert process.stdin is not None
        known = source in self._known
        number = hash(source)
        pickle.dump((number, None if known else source, items, seconds), process.stdin, protocol=5)
        process.stdin.flush()

    def _receive(self) -> tuple[bool, Any]:
        assert self._process is not None
        assert self._process.stdout is not None
        reply: tuple[bool, Any] = pickle.load(self._process.stdout)
        return reply

    def _end(self) -> int:
        """End the process if it has not ended; return how it did."""
        process, self._process = self._process, None
        if process is None:
            return 0
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()
        try:
            return process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            process.kill()
            return process.wait()

    def _how_it_ended(self, code: int, seconds: float) -> str:
        if code == -signal.SIGPROF:
            return f"it takes more than {seconds:.0f} s of processor time"
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        return f"it ends its process ({how}), or takes more than {self._limits.gib} GiB of memory"


def serve(loader: str, *, gib: int) -> None:
    """Be the child: answer what comes on stdin, on stdout, until it is closed or quiet."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stop in (signal.SIGTERM, signal.SIGUSR1):
        # a signal to the whole job: its ranks finish their step, and this is part of it
        signal.signal(stop, signal.SIG_IGN)
    _limit_memory(gib)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_WRONLY)
    # libraries speak of their faults there, which the parent does
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    programs: dict[int, Loaded] = {}
    # one request is answered before the next is sent, so that nothing waits in the buffer
    while select.select([requests], [], [], SECONDS_IDLE)[0]:
        try:
            number, source, items, seconds = pickle.load(requests)
        except EOFError:
            return
        for reply in _answers(programs, number, loader, source, items, seconds):
            pickle.dump(reply, replies, protocol=5)
            replies.flush()
            if not reply[0]:
                break


def _answers(
    programs: dict[int, Loaded],
    number: int,
    loader: str,
    source: bytes | None,
    items: Sequence[Any],
    seconds: float,
) -> Iterator[tuple[bool, Any]]:
    """Yield what is known of a program, and what it gives for each item, or a last reason."""
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if source is not None:
            programs[number] = _load(loader, source)
        run, about = programs[number]
        # it may be large, and is known once it was told
        yield True, None if items else about
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            result = run(item)
            signal.setitimer(signal.ITIMER_PROF, 0)
            yield True, result
    except MemoryError:
        yield False, "it takes too much memory"
    # a panic of a library in Rust is a BaseException
    except BaseException as error:  # noqa: BLE001
        yield False, _reason(error)
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def _limit_memory(gib: int) -> None:
    import resource

    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    limit = gib << 30
    resource.setrlimit(
        resource.RLIMIT_DATA, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard)
    )
