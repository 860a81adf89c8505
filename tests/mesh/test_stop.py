"""When this rank asks to stop, and when a signal ends it at once."""

from __future__ import annotations

import os
import signal
import threading
import time

import pytest

from torchtitan.mesh.stop import SIGNALS, StopRequest, describe, watch_session, watch_signals


class Process:
    """A clock to set, and the exit codes that a real process would have left with."""

    def __init__(self) -> None:
        self.now = 100.0
        self.codes: list[int] = []
        self.request = StopRequest(clock=lambda: self.now, leave=self.codes.append)


def test_a_signal_before_the_first_step_ends_the_process() -> None:
    process = Process()
    process.request.on_signal(signal.SIGTERM)
    assert process.codes == [4]


@pytest.mark.parametrize("number", SIGNALS)
def test_later_it_is_a_vote_and_the_second_ends_the_process(number: signal.Signals) -> None:
    process = Process()
    process.request.defer()
    assert process.request.votes() == [0, 0, 0]
    process.request.on_signal(number)
    assert process.request.votes() == [1, 0, 0]
    process.now += 0.9  # the same request, passed on by the launcher
    process.request.on_signal(signal.SIGTERM)
    assert process.codes == []
    process.now += 0.2
    process.request.on_signal(number)
    assert process.codes == [128 + number]


def test_a_wait_for_data_ends_soon_after_a_signal() -> None:
    process = Process()
    process.request.defer()
    process.request.look_from_aside()  # nobody waits
    with process.request.waiting(1000, describe=lambda: "my_data.py"):
        process.request.look_from_aside()
        process.request.on_signal(signal.SIGTERM)
        process.request.look_from_aside()
        assert process.codes == []
        process.now += 11
        process.request.look_from_aside()
    assert process.codes == [4]
    process.request.look_from_aside()
    assert process.codes == [4]


def test_the_deadline_counts_from_the_start() -> None:
    process = Process()
    process.request.end_after(10)
    process.now += 9
    assert process.request.votes() == [0, 0, 0]
    process.now += 1
    assert process.request.votes() == [0, 1, 0]
    process.request.end_after(None)
    assert process.request.votes() == [0, 0, 0]


def test_reasons() -> None:
    assert describe([0, 0, 0]) is None
    assert describe([1, 0, 0]) == "a signal (to 1 rank)"
    assert describe([2, 2, 2]) == "a signal (to 2 ranks)"
    assert describe([0, 2, 1]) == "its deadline, checkpoint.save_before_seconds"
    assert describe([0, 0, 1]) == "a callback (on 1 rank)"


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_of_the_process_are_taken_inside_alone(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in SIGNALS]
    with watch_signals() as request:
        request.defer()
        os.kill(os.getpid(), number)
        while not request.is_signalled:
            time.sleep(0.001)
    assert [signal.getsignal(n) for n in SIGNALS] == before
    assert signal.set_wakeup_fd(-1) == -1


@pytest.mark.parametrize("number", SIGNALS)
def test_a_session_is_interrupted_where_a_process_would_end(number: signal.Signals) -> None:
    before = [signal.getsignal(n) for n in SIGNALS]
    with pytest.raises(KeyboardInterrupt), watch_session():
        signal.raise_signal(number)  # before the first step
    with watch_session() as request:
        request.defer()
        signal.raise_signal(number)
        signal.raise_signal(number)  # the same request
        assert request.is_signalled
        request._first_signal = -1.0  # long ago
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)
    assert [signal.getsignal(n) for n in SIGNALS] == before


def test_a_session_takes_no_signal_in_another_thread() -> None:
    seen = []

    def watch() -> None:
        with watch_session() as request:
            seen.append(request.is_signalled)

    thread = threading.Thread(target=watch)
    thread.start()
    thread.join()
    assert seen == [False]
