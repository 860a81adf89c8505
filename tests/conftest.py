"""Fixtures for every test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.rank_pool import RankPool


@pytest.fixture(scope="session")
def ranks() -> Iterator[RankPool]:
    """Up to eight gloo ranks, shared by all tests: `ranks.run(function, *args, world=4)`."""
    pool = RankPool(8)
    yield pool
    pool.close()
