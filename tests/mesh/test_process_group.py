"""A process's place in the job."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import ConfigError
from torchtitan.mesh import process_group
from torchtitan.mesh.dims import ParallelDims, build_mesh
from torchtitan.mesh.process_group import (
    Launch,
    await_report,
    begin_report,
    is_first_to_report,
    read_launch,
    seconds_to_wait,
    set_timeout,
)

MEETING_POINT = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1"}


def test_a_process_started_alone_is_rank_0_of_1() -> None:
    assert read_launch({}) == Launch(rank=0, local_rank=0, world_size=1)


def test_torchruns_variables() -> None:
    environ = {"RANK": "9", "LOCAL_RANK": "1", "WORLD_SIZE": "16", **MEETING_POINT}
    assert read_launch(environ) == Launch(rank=9, local_rank=1, world_size=16)


@pytest.mark.parametrize(
    "environ", [{"RANK": "0"}, {"RANK": "x", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}]
)
def test_half_an_environment_is_refused(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="must all be numbers, or all be unset"):
        read_launch(environ)


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2"},
            "without MASTER_ADDR and MASTER_PORT",
        ),
        ({"RANK": "0", "LOCAL_RANK": "-1", "WORLD_SIZE": "1"}, "LOCAL_RANK 0 or more"),
        (
            {
                "RANK": "0",
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                **MEETING_POINT,
                "MASTER_PORT": "x",
            },
            "MASTER_PORT must be a port",
        ),
        (
            {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_PORT": "99999"},
            "MASTER_PORT must be a port",
        ),
        ({"RANK": "2", "LOCAL_RANK": "0", "WORLD_SIZE": "2", **MEETING_POINT}, "got RANK 2, WORLD"),
    ],
)
def test_ranks_that_could_not_meet_are_refused(environ: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_launch(environ)


def timeouts(seconds: int | None) -> set[float]:
    mesh = build_mesh(ParallelDims(dp_shard=2), device_type="cpu")
    if seconds is not None:
        set_timeout(seconds, groups=mesh.groups())
    groups = [dist.group.WORLD, *mesh.groups()]
    options = [group._get_backend(torch.device("cpu")).options for group in groups]
    return {option._timeout.total_seconds() for option in options}


def test_a_timeout_reaches_every_group(ranks: RankPool) -> None:
    assert len(ranks.run(timeouts, None, world=2)[0]) > 1  # torch's own differ: hence set_timeout
    assert ranks.run(timeouts, 77, world=2) == [{77.0}, {77.0}]


def waits(seconds: int) -> float:
    set_timeout(seconds, groups=[])
    return seconds_to_wait()


def test_how_long_other_ranks_wait_is_known(ranks: RankPool) -> None:
    for seconds in (300, 100):  # as in the first step, and later
        assert ranks.run(waits, seconds, world=2) == [seconds, seconds]


def test_ranks_that_do_not_come_are_waited_for_as_set(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own limit is half an hour; a second run with another one meets at the same store."""
    asked: list[timedelta] = []

    def rendezvous(url: str, *, timeout: timedelta, **place: int) -> Iterator[tuple[dist.Store]]:
        asked.append(timeout)
        yield (dist.HashStore(),)

    monkeypatch.setattr(process_group, "rendezvous", rendezvous)
    for name, value in MEETING_POINT.items():
        monkeypatch.setenv(name, value)
    launch = Launch(rank=0, local_rank=0, world_size=2)
    for seconds in (7, 8):
        process_group._store_of_run(launch, timeout=timedelta(seconds=seconds))
    assert asked == [timedelta(seconds=7)]


@pytest.mark.parametrize(
    ("one", "other"), [(is_first_to_report, begin_report), (begin_report, is_first_to_report)]
)
def test_a_mistake_and_a_lack_of_memory_are_both_reported(
    one: Callable[[], bool], other: Callable[[], bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever comes first; each of them once."""
    store = dist.HashStore()
    monkeypatch.setattr(process_group, "job_store", lambda: store)
    assert [one(), other(), one(), other()] == [True, True, False, False]


def test_nobody_waits_for_a_report_that_no_rank_has_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    class Store(dist.HashStore):
        def wait(self, *args: object) -> None:
            raise AssertionError(f"waits: {args}")

    store = Store()
    monkeypatch.setattr(process_group, "job_store", lambda: store)
    await_report(1000)
    begin_report()
    with pytest.raises(AssertionError, match="waits: "):
        await_report(1000)
