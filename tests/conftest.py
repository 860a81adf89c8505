"""Fixtures for every test."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import warm_python as warm
from tests.distributed.rank_pool import RankPool, start_server

# before torch is imported, here and in what tests start: two test processes share the cores, and
# threads that wait for each other spin, for several times the work itself at these sizes
os.environ.setdefault("OMP_NUM_THREADS", "1")
# a process that compiles starts a pool of others otherwise: each imports torch for a graph or two
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")


LONGEST = ("test_commands_run", "test_this_code_computes", "test_inductor")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add --gate, which ./scripts/run_tests.sh gives."""
    parser.addoption("--gate", action="store_true", help="leave out tests marked slow")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Begin with the longest tests, for which nobody should wait alone at the end."""
    if config.getoption("gate"):
        deselected = [item for item in items if is_slow(item)]
        config.hook.pytest_deselected(items=deselected)
        items[:] = [item for item in items if not is_slow(item)]
    items.sort(key=lambda item: not item.name.startswith(LONGEST))


def is_slow(item: pytest.Item) -> bool:
    """Return whether the gate leaves `item` out: `slow(gate=[CASE, ...])` keeps these cases."""
    mark = item.get_closest_marker("slow")
    if mark is None:
        return False
    case = item.name.partition("[")[2].removesuffix("]")
    return case not in mark.kwargs.get("gate", ())


@pytest.fixture(scope="session", autouse=True)
def server_of_ranks(request: pytest.FixtureRequest) -> None:
    if any("ranks" in item.fixturenames for item in request.session.items):
        start_server()


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to eight gloo ranks, shared by all tests: `ranks.run(function, *args, world=4)`."""
    pool = RankPool(8)
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def warm_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The path of a `python` that has torch imported already, for commands of which many run."""
    python, server = warm.start(tmp_path_factory.mktemp("warm"))
    yield python
    assert server.stdin is not None
    server.stdin.close()
    server.wait()


@pytest.fixture(scope="module")
def warm_starts(warm_python: Path) -> Iterator[None]:
    """All that a file starts by `sys.executable` starts warm."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(warm_python))
        yield
