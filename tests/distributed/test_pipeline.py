"""The same model in pipeline stages: losses, gradients and weights of one device.

Every schedule, and what it can be given; stages beside other features are in test_matrix.py.
float32, four layers or eight, a random number of valid labels a sample, and the same global batch
of 8 samples. Beside the norm each parameter's own gradient is compared, for a norm may hide that
one is wrong. What is lost in a step shows in the first two.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.pipeline_jobs import assert_same_training
from tests.distributed.rank_pool import RankPool
from tests.jobs import HSDP, TIED, TINY8, UNSAVED, pipeline

pytestmark = pytest.mark.slow

# the modules of two stages, cut where no cost would
LISTS = [
    ["tok_embeddings", *(f"layers.{i}" for i in range(3))],
    ["layers.3", "norm", "output"],
]
TWO_STEPS = "--training.steps=2"
BATCH8 = "--training.local_batch_size=8"
NEVER_CLIPPED = "--training.max_norm=inf"
CHUNKS = "--training.loss_chunks=3"
SELECTIVE = (
    "--activation_checkpoint.mode=selective",
    "--activation_checkpoint.selective_ac_option=1",
)
ONE_EACH = {
    "pipeline_parallel_layers_per_stage": 1,
    "pipeline_parallel_first_stage_less_layers": 0,
    "pipeline_parallel_last_stage_less_layers": 0,
}
FREED = {"fsdp_reshard_after_forward": "always"}
IN_TWOS = {"pipeline_parallel_microbatch_size": 2}
LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "2 microbatches": (2, pipeline("1F1B", **IN_TWOS)),
    # the gradients of the last stage's weights recomputed, and apart from those of its input
    "pp 2 x fsdp 2 GPipe, loss in chunks": (4, (*pipeline("GPipe"), CHUNKS)),
    "InterleavedZeroBubble, 4 microbatches of 2, loss in chunks": (
        2,
        (*pipeline("InterleavedZeroBubble", **IN_TWOS), BATCH8, CHUNKS),
    ),
    "pp 2 x fsdp 2 1F1B, weights freed": (4, pipeline("1F1B", **FREED)),
    "pp 2 x fsdp 2 LoopedBFS, weights freed": (4, pipeline("LoopedBFS", **FREED)),
    "pp 2 x fsdp 2 Interleaved1F1B": (4, pipeline("Interleaved1F1B")),
    "pp 2 x fsdp 2 InterleavedZeroBubble, 4 stages a rank": (
        4,
        pipeline("InterleavedZeroBubble", **ONE_EACH),
    ),
    "pp 2 x fsdp 2 ZBVZeroBubble, a rank without layers": (4, pipeline("ZBVZeroBubble")),
    "pp 2 x fsdp 2 DualPipeV, never clipped": (4, pipeline("DualPipeV")),
    "pp 2 x hsdp 2x2, listed modules": (
        8,
        (
            *pipeline("1F1B", module_fqns_per_model_part=json.dumps(LISTS)),
            *HSDP,
            "--training.local_batch_size=2",
        ),
    ),
    "pp 4 DualPipeV": (4, (*pipeline("DualPipeV", pp=4), BATCH8)),
    # recomputes nothing: torch would recompute a block for each group of its weights
    "ZBVZeroBubble, 8 microbatches, selective": (
        2,
        (*pipeline("ZBVZeroBubble"), BATCH8, *SELECTIVE),
    ),
    "more microbatches than Interleaved's rounds": (2, (*pipeline("Interleaved1F1B"), BATCH8)),
    # six stages for four layers: the embedding alone, norm and head alone
    "tied ends without layers": (
        2,
        (*pipeline("Interleaved1F1B", pipeline_parallel_layers_per_stage=1), CHUNKS),
    ),
}
EIGHT_LAYERS = "--model.num_layers=8"
WHAT = {
    "pp 4 DualPipeV": [EIGHT_LAYERS],
    "pp 2 x fsdp 2 InterleavedZeroBubble, 4 stages a rank": [EIGHT_LAYERS],
    "tied ends without layers": [TIED],
    "pp 2 x fsdp 2 ZBVZeroBubble, a rank without layers": ["--model.num_layers=2"],
    "pp 2 x fsdp 2 DualPipeV, never clipped": [NEVER_CLIPPED],
}


@pytest.mark.promise("pp", "clipping")
@pytest.mark.slow(gate=["2 microbatches"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, tmp_path: Path, cache: Path, on_one_device: OneDevice
) -> None:
    world, arguments = LAYOUTS[layout]
    what = [TWO_STEPS, *WHAT.get(layout, [])]
    reference = on_one_device(pj.train, *what, evaluating=True)
    job = [*jobs.write_job(tmp_path, TINY8, cache=cache), UNSAVED, *what, *arguments]
    results = ranks.run(pj.train, job, evaluating=True, world=world)
    assert_same_training(results, reference)
    pj.assert_same_evaluation(results, reference)
    pp = 4 if "pp 4" in layout else 2
    assert sum(result.owns_loss for result in results) * pp == world
