"""Qwen3 trains alike in every kind of layout: what norms of heads could break in each.

Gradients under tensor parallelism are tested with Llama's. Here are stages, split sequences,
compiled and recomputed blocks, each once, with tied embeddings as its small sizes have them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.pipeline_jobs import TINY8, Trained, assert_same_training, pipeline
from tests.distributed.rank_pool import RankPool

QWEN3 = TINY8.replace("[model]", '[model]\nname = "qwen3"')
TP2 = "--parallelism.tensor_parallel_degree=2"
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp 2, compiled": (2, (TP2, "--compile.enable", "--compile.backend=aot_eager")),
    "pp 2, tp 2, recomputed": (
        4,
        (
            *pipeline("1F1B", pipeline_parallel_microbatch_size=2),
            TP2,
            "--activation_checkpoint.mode=full",
        ),
    ),
    "cp 2, recomputed by operator": (
        2,
        (
            "--parallelism.context_parallel_degree=2",
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ),
    ),
}


@pytest.fixture(scope="module")
def on_one_device(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> Trained:
    job = jobs.write_job(tmp_path_factory.mktemp("one"), QWEN3, cache=cache)
    return ranks.run(pj.train, job, world=1)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: Trained
) -> None:
    world, arguments = LAYOUTS[layout]
    job = [*jobs.write_job(tmp_path, QWEN3, cache=cache), *arguments, jobs.UNSAVED]
    assert_same_training(ranks.run(pj.train, job, world=world), on_one_device)
