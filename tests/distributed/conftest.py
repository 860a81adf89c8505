"""What the tests of whole jobs share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY8, UNSAVED

OneDevice = Callable[..., Any]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for tokenised data, the same for all tests."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def texts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Documents of 1 to 82 tokens, for samples of 64."""
    draw = random.Random(0)
    lines = ("".join(draw.choices("abcde ", k=draw.randint(0, 3) ** 4 + 1)) for _ in range(400))
    path = tmp_path_factory.mktemp("data") / "texts.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in lines))
    return path


@pytest.fixture(scope="session")
def on_one_device(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> OneDevice:
    """Return what `function(job, **settings)` returns on one device: run once, for all tests."""
    found: dict[str, Any] = {}

    def reference(
        function: Callable[..., Any], *arguments: str, toml: str = TINY8, **settings: Any
    ) -> Any:
        key = f"{function.__module__}.{function.__name__} {arguments} {toml} {settings}"
        if key not in found:
            job = jobs.write_job(tmp_path_factory.mktemp("one"), toml, cache=cache)
            [found[key]] = ranks.run(function, [*job, UNSAVED, *arguments], world=1, **settings)
        return found[key]

    return reference
