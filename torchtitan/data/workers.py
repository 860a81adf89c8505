"""Processes that read data ahead: started without signals, and ended with their parent."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing import forkserver, resource_tracker
from multiprocessing.context import BaseContext

CHECK_SECONDS = 1.0
"""Interval at which a process checks that its parent is alive."""


def worker_context(*, preload: str) -> BaseContext:
    """Return a way to start workers without forking this process, which has CUDA and threads.

    `preload` is the module that they need.
    """
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    # torch is imported once, in the server that forks all workers
    context.set_forkserver_preload([preload])
    _start_server_without_signals()
    return context


def _start_server_without_signals() -> None:
    # A signal to all processes of the job, or Ctrl-C, would end the workers during the step that
    # the ranks want to finish. Workers inherit the blocked signals, and end when their rank ends.
    blocked = {signal.SIGTERM, signal.SIGUSR1, signal.SIGINT}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, blocked)
    resource_tracker.ensure_running()
    signal.pthread_sigmask(signal.SIG_BLOCK, blocked)  # starting it has unblocked some of them
    forkserver.ensure_running()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)


def end_with_parent() -> None:
    """End this process when the one that started it has ended.

    torch's workers watch the server that forks them, which survives when a rank is killed.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        while parent.is_alive() and not _receives_sigterm(parent.pid):
            pass
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()


def _receives_sigterm(parent: int | None) -> bool:
    """Wait a moment for SIGTERM from the parent, which ends its workers at exit and joins them.

    A worker blocks the SIGTERM of any other process.
    """
    if sys.platform != "linux":
        time.sleep(CHECK_SECONDS)
        return False
    signal_info = signal.sigtimedwait([signal.SIGTERM], CHECK_SECONDS)
    return signal_info is not None and signal_info.si_pid == parent
