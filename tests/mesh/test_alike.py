"""Ranks that were given different settings say so before they wait for each other."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed.jobs import places_of_ranks, write_job
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from tests.naming import naming
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.job import load_config
from torchtitan.mesh.ranks import check_alike, check_data_alike

ROOT = Path(__file__).parent.parent.parent


def said_of(options: list[list[str]]) -> str:
    try:
        check_alike(load_config(options[dist.get_rank()]))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.promise("other-data")
@pytest.mark.parametrize(
    ("options", "values"),
    [
        ([[], [], ["--training.steps=7"]], ["rank 2", "rank 0", "training.steps", 7]),
        ([["--training.steps=7"], [], []], ["ranks 1, 2", "rank 0", "training.steps", 7]),
        (
            [
                [],
                ["--model.flavor=tiny", "--debug.seed=3", "--optimizer.lr=1", "--training.steps=5"],
            ],
            ["rank 1", "rank 0", 1],
        ),
    ],
)
def test_every_rank_says_which_setting(
    options: list[list[str]], values: list[object], ranks: RankPool
) -> None:
    found = ranks.run(said_of, options, world=len(options))
    assert len(set(found)) == 1
    assert naming(*values).match(found[0])


@pytest.mark.promise("hangs")
@pytest.mark.slow
def test_a_job_ends_in_code_2(tmp_path: Path, warm_python: Path) -> None:
    """Not in a time-out: one rank would ask all which type to compute in, the other would not."""
    job = [*write_job(tmp_path), UNSAVED, "--training.steps=1"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    started = [
        subprocess.Popen(
            [warm_python, "-m", "torchtitan.train", *job, *option],
            env={**environ, **place},
            stderr=subprocess.PIPE,
            text=True,
        )
        for place, option in zip(
            places_of_ranks(2), [[], ["--training.mixed_precision_param=auto"]], strict=True
        )
    ]
    try:
        errors = [process.communicate(timeout=120)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    assert [process.returncode for process in started] == [2, 2]
    said = "".join(errors)
    # without a launcher that ends the other rank, each reports it
    assert len(re.findall("all ranks must have the same settings", said)) == 2
    assert naming("training.mixed_precision_param", '"auto"', '"float32"', "rank 0").match(said)


def said_of_data(files: list[str]) -> str:
    try:
        check_data_alike({"seq_len": "64", "data": files[dist.get_rank()]})
    except DataError as error:
        return str(error)
    return ""


@pytest.mark.promise("other-data")
def test_every_rank_says_whose_data_differ(ranks: RankPool) -> None:
    assert ranks.run(said_of_data, ["a", "a", "a"], world=3) == ["", "", ""]
    [said] = set(ranks.run(said_of_data, ["a", "a", "b"], world=3))
    assert naming("rank 2", "rank 0", "data", "b", "a").match(said)
