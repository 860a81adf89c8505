"""Runs in one process, one after the other: what each leaves, and that the next one works."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import signal
import threading
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.distributed.jobs import read_rows, write_job
from torchtitan.base.errors import ConfigError, NonFiniteError
from torchtitan.checkpoint.checksums import seal, write_bytes
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


def harm_json(file: Path, change: dict[str, Any]) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **change}))


def reseal(step: Path, change: dict[str, Any]) -> None:
    manifest = json.loads((step / "manifest.json").read_text())
    del manifest["checksum"]
    write_bytes(step / "manifest.json", seal({**manifest, **change}))


def make_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


@pytest.mark.promise("mistakes")
@pytest.mark.slow
def test_a_run_folder_that_somebody_has_edited_ends_in_code_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def job(folder: Path, *options: str) -> list[str]:
        return [
            *write_job(tmp_path, name=folder.name, cache=tmp_path / "cache"),
            f"--job.dump_folder={folder}",
            "--checkpoint.enable",
            "--checkpoint.verify_on_load=false",
            "--lr_scheduler.total_steps=2",
            *options,
        ]

    assert code_of(job(tmp_path / "whole", "--training.steps=1")) == 0
    harms: list[tuple[str, Callable[[Path, Path], object], str]] = [
        (
            "a",
            lambda d, s: harm_json(s / "train_state/state.json", {"step": -1}),
            "'step'",
        ),
        ("d", lambda d, s: reseal(s, {"components": ["model"]}), "optimizer"),
        ("e", lambda d, s: reseal(s, {"config": "= ="}), "manifest.json"),
        ("f", lambda d, s: make_folder(d / "metrics.jsonl"), "metrics.jsonl"),
    ]
    for name, harm, said in harms:
        folder = tmp_path / name
        shutil.copytree(tmp_path / "whole", folder)
        harm(folder, folder / "checkpoint" / "step-1")
        capsys.readouterr()
        assert code_of(job(folder, "--training.steps=2")) == 2, said
        assert said in capsys.readouterr().err
    folder = tmp_path / "no_text"
    shutil.copytree(tmp_path / "whole", folder)
    shutil.rmtree(folder / "checkpoint")
    (folder / "config.toml").write_bytes(b"\xff\xfe")
    assert code_of(job(folder, "--training.steps=2")) == 2
    assert "config.toml" in capsys.readouterr().err
