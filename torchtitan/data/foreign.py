"""Run programs that come with a model in a child process with limits.

A chat template is a program, and so, in effect, is a tokenizer file with its regular expressions.
Either can run forever, take all memory or crash the library that runs it, by mistake or on purpose.
A process cannot stop that from inside: a power of large numbers or a regular expression holds the
interpreter until it is done, and limits on a template's loops do not limit its filters, methods and
operators. So they run in a child, which the kernel ends when it takes too much processor time (not
wall time: the machine may be busy) or memory; the parent then raises an error.

The child is a new interpreter, started when first needed, without the trainer's CUDA and threads.
It ignores signals to the job, and ends with its parent or after a minute without work; the next
work starts another. All programs of a kind share one child.
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
"""A function that runs an item, and facts about the program."""
SECONDS_IDLE = 60


class ForeignError(Exception):
    """A program failed, or was ended, on the item `index`."""

    def __init__(self, reason: str, *, index: int = 0) -> None:
        super().__init__(reason)
        self.index = index


@dataclass(frozen=True)
class Limits:
    """What a program may take to run one item, or to load."""

    seconds: float
    gib: int


class Program:
    """A stranger's program: the text `source` and the function that loads it.

    `loader` names that function, as `package.module:function`. It returns `Loaded`, whose second
    part becomes `about`. A `trusted` program, which comes with this package, runs in this process.

    Raises ForeignError if it cannot be loaded.
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
        """Return the result of each item; raise ForeignError for the first that fails.

        `seconds`: for one item, instead of those of the limits.
        """
        if self._run is None:
            return self._ask(items, seconds=seconds)[1:]
        results = []
        for index, item in enumerate(items):
            with _told(index):
                results.append(self._run(item))
        return results

    def _ask(self, items: Sequence[Any], *, seconds: float | None = None) -> list[Any]:
        """Return the facts about the program, and the result of each item."""
        child = _child(self._loader, self._limits)
        return child.ask(self._source, items, seconds=seconds or self._limits.seconds)


@contextlib.contextmanager
def _told(index: int) -> Iterator[None]:
    try:
        yield
    # whatever it raises is the fault of the program or of its input
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
    """The process for programs of one kind, started when there is work."""

    def __init__(self, loader: str, limits: Limits) -> None:
        self._loader, self._limits = loader, limits
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._known: set[bytes] = set()
        self._last_answered = 0.0

    def ask(self, source: bytes, items: Sequence[Any], *, seconds: float) -> list[Any]:
        """Load a program if it is not loaded, and run it on items; raise ForeignError."""
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
                # whatever it still sends is not the answer to a later request
                code = self._end()
                if not isinstance(error, EOFError | BrokenPipeError | pickle.UnpicklingError):
                    raise
                fine, value = False, self._how_it_ended(code, seconds)
        if not fine:
            raise ForeignError(value, index=max(len(replies) - 1, 0))
        return replies

    def _send(self, source: bytes, items: Sequence[Any], seconds: float) -> None:
        process = self._process
        # after half of the idle time it might end while it gets a request
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
                # each of numpy's threads, one per core, would count its stack as memory
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
        """End the process if it runs; return its exit code."""
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
    """Run as the child: answer requests on stdin, until it is closed or idle."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for stop in (signal.SIGTERM, signal.SIGUSR1):
        # sent to the whole job: its ranks finish their step, which may need this child
        signal.signal(stop, signal.SIG_IGN)
    _limit_memory(gib)
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_WRONLY)
    # without the output of libraries: the parent reports errors
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    programs: dict[int, Loaded] = {}
    # select sees all requests: none is in the buffer, as each is answered before the next
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
    """Yield the facts about a program, then the result of each item; at a failure its reason."""
    try:
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if source is not None:
            programs[number] = _load(loader, source)
        run, about = programs[number]
        # it may be large, so it is sent once
        yield True, None if items else about
        for item in items:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            result = run(item)
            signal.setitimer(signal.ITIMER_PROF, 0)
            yield True, result
    except MemoryError:
        yield False, "it takes too much memory"
    # a panic in Rust is a BaseException
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
