"""The example of a model of one's own trains alike in every layout, and resumes bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.pipeline_jobs import TINY8, assert_same_training, pipeline
from tests.distributed.rank_pool import RankPool
from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.layout import find_layout

NAME = "examples.parallel_block:SPEC"
TOML = TINY8.replace('"tiny8"', '"tiny"').replace("[model]", f'[model]\nname = "{NAME}"')
TP2 = "--parallelism.tensor_parallel_degree=2"
CP2 = "--parallelism.context_parallel_degree=2"
RECOMPUTED = "--activation_checkpoint.mode=full"
COMPILED = ("--compile.enable", "--compile.backend=aot_eager")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "fsdp 2, compiled": (2, ("--training.local_batch_size=2", *COMPILED)),
    "tp 2": (2, (TP2,)),
    "pp 2": (2, pipeline("ZBVZeroBubble")),
    "fsdp 2, cp 2, recomputed": (
        4,
        ("--activation_checkpoint.mode=full", "--training.local_batch_size=2", CP2),
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(layout: str, ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    world, arguments = LAYOUTS[layout]
    alone, split = (
        [*jobs.write_job(tmp_path, TOML, name=name, cache=cache), jobs.UNSAVED]
        for name in ("alone", "split")
    )
    [on_one_device] = ranks.run(pj.train, alone, sizes={}, world=1)
    assert_same_training(
        ranks.run(pj.train, [*split, *arguments], sizes={}, world=world), on_one_device
    )


def test_it_resumes_bit_for_bit(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    straight, twice = (
        jobs.write_job(tmp_path, TOML, name=name, cache=cache) for name in ("straight", "twice")
    )
    schedule = "--lr_scheduler.total_steps=3"
    expected = ranks.run(jobs.train, [*straight, schedule, TP2], world=2)
    ranks.run(jobs.train, [*twice, schedule, TP2, "--training.steps=2"], world=2)
    found = ranks.run(jobs.train, [*twice, schedule, TP2], world=2)
    assert [r.state_hash for r in found] == [r.state_hash for r in expected]
    assert found[0].rows[-1]["loss"] == expected[0].rows[-1]["loss"]


def test_without_a_plan_it_is_not_split() -> None:
    job = ["--model.name=examples.without_plan:SPEC", "--model.flavor=tiny"]
    job = [option.replace("examples.", f"{__package__}.") for option in job]
    find_layout(load_config(job), world_size=2)
    with pytest.raises(ConfigError, match="tensor_plan"):
        find_layout(load_config([*job, TP2]), world_size=2)
