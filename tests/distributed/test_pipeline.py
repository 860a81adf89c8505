"""The same model in pipeline stages: losses, gradients and weights of one device.

float32, eight layers, a random number of valid labels a sample, and the same global batch of 8
samples. Beside the norm each parameter's own gradient is compared, for a norm may hide that one is
wrong. Four steps: what is lost in a step shows in the first two.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.pipeline_jobs import (
    SCHEDULES,
    TINY8,
    Trained,
    assert_same_training,
    pipeline,
)
from tests.distributed.rank_pool import RankPool

WHOLE_BACKWARD = ("GPipe", "1F1B", "Interleaved1F1B", "LoopedBFS")
# the modules of two stages, cut where no cost would
LISTS = [
    ["tok_embeddings", *(f"layers.{i}" for i in range(3))],
    [*(f"layers.{i}" for i in range(3, 8)), "norm", "output"],
]
BATCH8 = "--training.local_batch_size=8"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    **{f"pp 2 {name}": (2, pipeline(name)) for name in SCHEDULES},
    **{f"pp 2 x fsdp 2 {name}": (4, pipeline(name)) for name in SCHEDULES},
    **{
        f"pp 2 x fsdp 2 {name}, weights freed": (
            4,
            pipeline(name, fsdp_reshard_after_forward="always"),
        )
        for name in WHOLE_BACKWARD
    },
    "pp 4 1F1B": (4, pipeline("1F1B", pp=4)),
    "pp 4 Interleaved1F1B": (4, pipeline("Interleaved1F1B", pp=4)),
    "pp 4 DualPipeV": (4, (*pipeline("DualPipeV", pp=4), BATCH8)),
    "4 stages a rank": (
        2,
        pipeline(
            "Interleaved1F1B",
            pipeline_parallel_layers_per_stage=1,
            pipeline_parallel_last_stage_less_layers=0,
        ),
    ),
    "8 microbatches": (2, (*pipeline("ZBVZeroBubble"), BATCH8)),
    "2 microbatches": (2, pipeline("1F1B", pipeline_parallel_microbatch_size=2)),
    "4 microbatches of 2": (
        2,
        (*pipeline("InterleavedZeroBubble", pipeline_parallel_num_microbatches=4), BATCH8),
    ),
    "more microbatches than Interleaved's rounds": (2, (*pipeline("Interleaved1F1B"), BATCH8)),
    "listed modules": (2, pipeline("1F1B", module_fqns_per_model_part=json.dumps(LISTS))),
    "pp 2 x ddp 2": (4, (*pipeline("ZBVZeroBubble"), *jobs.DDP, "--training.local_batch_size=2")),
    "pp 2 x hsdp 2x2": (8, (*pipeline("1F1B"), *jobs.HSDP, "--training.local_batch_size=2")),
    "recomputed": (4, (*pipeline("ZBVZeroBubble"), "--activation_checkpoint.mode=full")),
    "partly recomputed": (
        4,
        (*pipeline("InterleavedZeroBubble"), "--activation_checkpoint.mode=selective"),
    ),
    "never clipped": (2, (*pipeline("DualPipeV"), "--training.max_norm=inf")),
}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def references(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> dict[str, Trained]:
    """One device: as most jobs, never clipped, and with tied embeddings."""
    found = {}
    for name, function, arguments in (
        ("plain", pj.train, ()),
        ("never clipped", pj.train, ("--training.max_norm=inf",)),
        ("tied", pj.train_tied, ()),
    ):
        folder = tmp_path_factory.mktemp("one")
        job = jobs.write_job(folder, TINY8, cache=cache)
        [found[name]] = ranks.run(function, [*job, *arguments], evaluating=True, world=1)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, references: dict[str, Trained]
) -> None:
    world, arguments = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *arguments]
    results = ranks.run(pj.train, job, evaluating=True, world=world)
    reference = references.get(layout, references["plain"])
    assert_same_training(results, reference)
    owners = [result for result in results if result.owns_loss]
    pp = 4 if "pp 4" in layout else 2
    assert len(owners) * pp == world
    for result in results:
        if result.owns_loss:
            assert result.evaluated == pytest.approx(reference.evaluated, rel=1e-5)
        else:
            assert not any(result.evaluated)


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("schedule", ["1F1B", "Interleaved1F1B", "ZBVZeroBubble"])
def test_tied_embeddings_on_two_stages(
    schedule: str,
    world: int,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    references: dict[str, Trained],
) -> None:
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *pipeline(schedule)]
    results = ranks.run(pj.train_tied, job, evaluating=True, world=world)
    assert_same_training(results, references["tied"])
    [evaluated, *_] = [result.evaluated for result in results if result.owns_loss]
    assert evaluated == pytest.approx(references["tied"].evaluated, rel=1e-5)
