"""Runs in one process, one after the other: what each leaves, and that the next one works."""

from __future__ import annotations

import gc
import logging
import os
import signal
import threading
import warnings
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.jobs import read_rows, write_job
from torchtitan.base.errors import ConfigError, NonFiniteError
from torchtitan.train import main

ROOT = Path(__file__).parent.parent


def process_state() -> dict[str, Any]:
    """All of this process that a run could change."""
    return {
        "group": dist.is_initialized(),
        "signals": [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)],
        "handlers": list(logging.getLogger().handlers),
        "level": logging.getLogger("torchtitan").level,
        "warnings": (list(warnings.filters), warnings.showwarning),
        "gc": (gc.isenabled(), gc.get_freeze_count()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "rng": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "device": torch.get_default_device(),
        "environ": dict(os.environ),
        "threads": {thread.name for thread in threading.enumerate()},
        "files": sorted(
            os.path.realpath(f"/proc/self/fd/{n}")
            for n in os.listdir("/proc/self/fd")
            if Path(f"/proc/self/fd/{n}").exists()
        ),
    }


def run(argv: list[str]) -> None:
    with ExitStack() as cleanup:
        assert main(argv, cleanup=cleanup) == 0


def code_of(argv: list[str]) -> int:
    with ExitStack() as cleanup:
        return main(argv, cleanup=cleanup)


def losses(folder: Path) -> list[float]:
    return [row["loss"] for row in read_rows(folder)]


DETERMINISTIC = "--debug.deterministic=true"


@pytest.mark.promise("same-bits")
@pytest.mark.slow
def test_runs_follow_one_another_also_after_one_that_failed(tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    first, failed, third = (
        [*write_job(tmp_path, name=name, cache=cache), "--training.steps=3", DETERMINISTIC]
        for name in ("first", "failed", "third")
    )
    untouched = process_state()
    warm_up = [*write_job(tmp_path, name="warm_up", cache=cache), "--training.steps=1"]
    run([*warm_up, DETERMINISTIC])
    before = process_state()
    for once in ("threads", "files"):  # torch starts pools and opens libraries at first use
        untouched[once] = before[once]
    assert before == untouched
    run(first)
    assert process_state() == before
    assert code_of([*failed, "--optimizer.lr=1e30"]) == NonFiniteError.exit_code
    assert process_state() == before
    assert code_of([*failed, "--training.stepz=1"]) == ConfigError.exit_code
    assert process_state() == before
    assert code_of(third) == 0
    assert process_state() == before
    assert losses(tmp_path / "third") == losses(tmp_path / "first")
    assert len(losses(tmp_path / "third")) == 3
