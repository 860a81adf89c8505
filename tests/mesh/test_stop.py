"""When this rank asks to stop, and when a signal ends it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator

import pytest
import torch.distributed as dist

from tests.naming import naming
from torchtitan.base.errors import StalledError
from torchtitan.mesh import stop
from torchtitan.mesh.stop import (
    SIGNALS,
    StopRequest,
    WaitInterrupted,
    interrupt,
    watch_signals,
)

HANDLED = (*SIGNALS, signal.SIGALRM)


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
    assert process.request.votes() == [0, 0]
    process.request.on_signal(number)
    assert process.request.votes() == [1, 0]
    process.now += 0.9  # the same request, passed on by the launcher
    process.request.on_signal(signal.SIGTERM)
    assert process.codes == []
    process.now += 0.2
    process.request.on_signal(number)
    assert process.codes == [128 + number]


def test_the_deadline_counts_from_the_start() -> None:
    process = Process()
    process.request.end_after(10)
    process.now += 9
    assert process.request.votes() == [0, 0]
    process.now += 1
    assert process.request.votes() == [0, 1]
    process.request.end_after(None)
    assert process.request.votes() == [0, 0]


@pytest.fixture
def handlers() -> Iterator[None]:
    before = [signal.getsignal(n) for n in HANDLED]
    yield
    assert [signal.getsignal(n) for n in HANDLED] == before


@pytest.mark.parametrize("number", SIGNALS)
def test_signals_are_handled_inside_only(number: signal.Signals, handlers: None) -> None:
    with watch_signals() as request:
        request.defer()
        signal.raise_signal(number)
        assert request.is_signalled


def test_several_ranks_handle_no_signal_before_the_first_step(
    handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They wait for each other in C++, where a handler of Python would never run."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    before = signal.getsignal(signal.SIGTERM)
    with watch_signals() as request:
        assert signal.getsignal(signal.SIGTERM) == before
        request.defer()
        assert signal.getsignal(signal.SIGTERM) == request.on_signal


@pytest.mark.parametrize("number", SIGNALS)
def test_a_session_is_interrupted_where_a_process_would_end(
    number: signal.Signals, handlers: None
) -> None:
    with pytest.raises(KeyboardInterrupt), watch_signals(leave=interrupt):
        signal.raise_signal(number)  # before the first step
    with watch_signals(leave=interrupt) as request:
        request.defer()
        signal.raise_signal(number)
        signal.raise_signal(number)  # the same request
        assert request.is_signalled
        request._first_signal = -1.0  # long ago
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(number)


@pytest.fixture
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_signal_ends_the_wait_of_the_only_rank(
    handlers: None, one_rank: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stop, "SECONDS_FOR_DATA", 0.1)
    with watch_signals() as request:
        request.defer()
        with pytest.raises(WaitInterrupted), request.waiting_for_data():
            time.sleep(60 if signal.raise_signal(signal.SIGTERM) is None else 0)
        with pytest.raises(WaitInterrupted), request.waiting_for_data():
            time.sleep(60)  # it was asked before the wait began
        assert signal.getitimer(signal.ITIMER_REAL)[0] == 0


@pytest.mark.promise("hangs")
def test_data_that_do_not_come_in_time(handlers: None, one_rank: None) -> None:
    with watch_signals() as request:
        request.data_timeout_seconds = 0.1
        with (
            pytest.raises(StalledError, match=naming("rank 0", "0.08 s", "train_timeout_seconds")),
            request.waiting_for_data(),
        ):
            time.sleep(60)
        with request.waiting_for_data():
            pass
        time.sleep(0.2)  # the alarm is off
