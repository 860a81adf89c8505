"""Pipelines of tensor-parallel stages, of split sequences too: still the model of one device.

What each axis does by itself is tested next door; here is what only mixes can break: the stream
that travels is split along the sequence, logits along the vocabulary, and a gradient's norm is
summed over all axes.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.pipeline_jobs import TINY8, Trained, assert_same_training, pipeline
from tests.distributed.rank_pool import RankPool

TP2 = "--parallelism.tensor_parallel_degree=2"
WHOLE = ("--parallelism.enable_sequence_parallel=false", "--parallelism.disable_loss_parallel")
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "pp 2 1F1B x tp 2": (4, (*pipeline("1F1B"), TP2)),
    "pp 2 ZBV x tp 2": (4, (*pipeline("ZBVZeroBubble"), TP2)),
    "pp 2 DualPipeV x tp 2, nothing else split": (4, (*pipeline("DualPipeV"), TP2, *WHOLE)),
    "pp 2 1F1B x fsdp 2 x tp 2": (8, (*pipeline("1F1B"), TP2)),
    "pp 2 ZBV x fsdp 2 x tp 2": (8, (*pipeline("ZBVZeroBubble"), TP2)),
    "pp 2 1F1B x tp 2, recomputed": (
        4,
        (*pipeline("1F1B"), TP2, "--activation_checkpoint.mode=full"),
    ),
    "pp 2 Interleaved1F1B x ddp 2 x tp 2": (8, (*pipeline("Interleaved1F1B"), *jobs.DDP, TP2)),
}
CP2 = "--parallelism.context_parallel_degree=2"
RING = "--parallelism.context_parallel_rotate_method=ring"
ULYSSES = "--parallelism.context_parallel_rotate_method=ulysses"
# sequences split too
SPLIT: dict[str, tuple[int, tuple[str, ...]]] = {
    "cp 2 x tp 2": (4, (CP2, TP2)),
    "cp 2 ring x tp 2, stream copied": (4, (CP2, RING, TP2, WHOLE[0])),
    "cp 2 ulysses x tp 2": (4, (CP2, ULYSSES, TP2)),
    "cp 2 x pp 2 1F1B": (4, (CP2, *pipeline("1F1B"))),
    "cp 2 ring x pp 2 ZBV": (4, (CP2, RING, *pipeline("ZBVZeroBubble"))),
    "cp 2 x pp 2 1F1B x tp 2": (8, (CP2, *pipeline("1F1B"), TP2)),
}
CHAIN = [
    (4, pipeline("ZBVZeroBubble")),  # x fsdp 2
    (4, (TP2,)),  # x fsdp 2
    (1, ()),
    (4, (CP2, *pipeline("1F1B"))),
    (8, (*pipeline("1F1B"), TP2)),  # x fsdp 2
]


@pytest.fixture(scope="module")
def references(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> dict[bool, Trained]:
    """One device, by whether the embeddings are tied."""
    found = {}
    for tied, function in ((False, pj.train), (True, pj.train_tied)):
        job = jobs.write_job(tmp_path_factory.mktemp("one"), TINY8, cache=cache)
        [found[tied]] = ranks.run(function, job, evaluating=True, world=1)
    return found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, references: dict[bool, Trained]
) -> None:
    world, arguments = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *arguments]
    results = ranks.run(pj.train, job, evaluating=True, world=world)
    assert_same_training(results, references[False])
    for result in results:
        expected = references[False].evaluated if result.owns_loss else [0.0] * pj.STEPS
        assert result.evaluated == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("layout", SPLIT)
def test_the_same_model_of_split_sequences(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, references: dict[bool, Trained]
) -> None:
    world, arguments = SPLIT[layout]
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *arguments]
    assert_same_training(ranks.run(pj.train, job, world=world), references[False])


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_tied_embeddings(
    schedule: str, ranks: RankPool, tmp_path: Path, cache: Path, references: dict[bool, Trained]
) -> None:
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), *pipeline(schedule), TP2]
    results = ranks.run(pj.train_tied, job, world=4)
    assert_same_training(results, references[True])


def test_a_run_goes_through_mixes_as_if_on_one_device(
    ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    """Two steps in each layout, from checkpoint to checkpoint, against one device in one go."""
    steps = 2 * len(CHAIN)
    one = [*jobs.write_job(tmp_path, TINY8, name="one", cache=cache), f"--training.steps={steps}"]
    [reference] = ranks.run(pj.train, one, world=1)
    job = jobs.write_job(tmp_path, TINY8, cache=cache)
    for index, (world, arguments) in enumerate(CHAIN, start=1):
        results = ranks.run(
            pj.train, [*job, *arguments, f"--training.steps={2 * index}"], world=world
        )
    pj.assert_same_course(results, reference)
