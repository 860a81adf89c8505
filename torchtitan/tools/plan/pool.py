"""Processes for rehearsals: one process can be a rank of one world at a time.

They are forked from a server that has imported torch, which takes seconds.
"""

from __future__ import annotations

import multiprocessing
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing.context import BaseContext
from multiprocessing.pool import Pool
from typing import TypeVar

from torchtitan.data.workers import worker_context

MOST = 16
"""Largest number of processes. Each takes about 0.4 GiB."""
PATIENCE = 10
"""Seconds between two reports of progress."""
T = TypeVar("T")
U = TypeVar("U")


def start_server() -> BaseContext:
    """Start the server, which imports in parallel with this process, if it does not run yet."""
    return worker_context(preload="torchtitan.tools.plan.records")


@contextmanager
def open_pool(num_jobs: int) -> Iterator[Pool]:
    """Start processes for a number of rehearsals, and end them with the context."""
    from torchtitan.data.prepare import num_cores

    num = max(1, min(num_jobs, num_cores(), MOST))
    with start_server().Pool(num, _receive_sigterm) as pool:
        yield pool


def _receive_sigterm() -> None:
    """Let the pool end this process, which inherits the signals that the server blocks. Ctrl-C
    stays blocked: the parent handles it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def run_in(
    pool: Pool, work: Callable[[T], U], items: Sequence[T], *, names: Sequence[str]
) -> Iterator[U]:
    """Yield the result for each item in order, and report progress by the items' names, each as
    soon as it is done."""
    sys.stderr.write(f"rehearsing {len(items)}: {'; '.join(names)}\n")
    results = pool.imap_unordered(partial(_numbered, work), enumerate(items))
    start, done = time.monotonic(), dict[int, U]()
    for number, name in enumerate(names):
        while number not in done:
            try:
                job_index, result = results.next(timeout=PATIENCE)
            except multiprocessing.TimeoutError:
                elapsed = time.monotonic() - start
                sys.stderr.write(f"still rehearsing {name}, {elapsed:.0f} s\n")
                continue
            done[job_index] = result
            sys.stderr.write(f"rehearsed {len(done)} of {len(items)}: {names[job_index]}\n")
        yield done[number]


def _numbered(work: Callable[[T], U], item: tuple[int, T]) -> tuple[int, U]:
    return item[0], work(item[1])
