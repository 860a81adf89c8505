"""Families with blocks of their own, of one class or two, train in the usual layouts.

The first is that of docs/extend.md.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.jobs import TINY
from tests.models import two_blocks
from tests.models.own_family import in_models, load_family, write_family
from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.layout import find_layout

TOML = TINY.replace("[model]", '[model]\nname = "parallel"').replace("steps = 20", "steps = 4")
TOML = TOML.replace("local_batch_size = 2", "local_batch_size = 4")
BFLOAT16 = "--training.mixed_precision_param=bfloat16"
COMPILED = ("--compile.enable", "--compile.backend=aot_eager")
RECOMPUTED = "--activation_checkpoint.mode=full"
CP2 = "--parallelism.context_parallel_degree=2"
WITHIN = "--training.attn_mask_type=block_causal"


def train(family: Path, job: list[str]) -> jobs.Result:
    """Train with the family among the models, on this rank."""
    with in_models(load_family(family).SPEC):
        return jobs.train(job)


TWO_KINDS = TOML.replace('"parallel"', '"two_kinds"')
PP2 = ("--parallelism.pipeline_parallel_degree=2", "--training.local_batch_size=2")


def train_two_kinds(job: list[str]) -> jobs.Result:
    with in_models(two_blocks.SPEC):
        return jobs.train(job)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "world"),
    [((*COMPILED, *PP2), 2), ((BFLOAT16, *COMPILED), 1)],
    ids=["pp 2", "bfloat16"],
)
def test_compiled_blocks_of_two_classes_train_to_the_same_losses(
    options: tuple[str, ...], world: int, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    plain = tuple(option for option in options if option not in COMPILED)
    job = jobs.write_job(tmp_path, TWO_KINDS, name="one", cache=cache)
    expected = ranks.run(train_two_kinds, [*job, *(plain if world == 1 else ())], world=1)[0]
    job = jobs.write_job(tmp_path, TWO_KINDS, name="other", cache=cache)
    got = ranks.run(train_two_kinds, [*job, *options], world=world)[0]
    for one, two in zip(figures(got), figures(expected), strict=True):
        assert one == pytest.approx(two, rel=1e-6 if world > 1 else 1e-3)
    losses = [loss for loss, _ in figures(got)]
    assert losses[-1] < losses[0]


def figures(result: jobs.Result) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in result.rows]


@pytest.mark.promise("nobody-forks")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("plain", "other", "world", "bound"),
    [
        ((), (*COMPILED, RECOMPUTED), 1, 1e-6),
        ((WITHIN,), (CP2, WITHIN), 2, 1e-6),
        # norms with a bias, which nothing casts by itself
        ((BFLOAT16,), (BFLOAT16,), 2, 1e-3),
    ],
    ids=["compiled and recomputed", "cp 2 within documents", "bfloat16, fsdp 2"],
)
def test_it_trains_to_the_same_losses(
    plain: tuple[str, ...],
    other: tuple[str, ...],
    world: int,
    bound: float,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
) -> None:
    family = write_family(tmp_path)
    found = []
    for name, options, num_ranks in (("one", plain, 1), ("other", other, world)):
        job = [*jobs.write_job(tmp_path, TOML, name=name, cache=cache), *options]
        found.append(ranks.run(train, family, job, world=num_ranks)[0])
    expected, got = found
    assert got.initial.keys() == expected.initial.keys()
    assert all(got.initial[name].equal(expected.initial[name]) for name in expected.initial)
    for one, two in zip(figures(got), figures(expected), strict=True):
        assert one == pytest.approx(two, rel=bound)
    losses = [loss for loss, _ in figures(got)]
    assert losses[-1] < losses[0]


def test_an_example_without_a_plan_is_not_split() -> None:
    job = [f"--model.name={__package__}.without_plan:SPEC", "--model.flavor=tiny"]
    find_layout(load_config(job), world_size=2)
    with pytest.raises(ConfigError, match=naming("tensor_plan")):
        find_layout(load_config([*job, "--parallelism.tensor_parallel_degree=2"]), world_size=2)
