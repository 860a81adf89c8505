"""Jobs whose ranks share each sequence: what they must not get wrong, and what they repeat.

That they train the model of one device is in test_matrix.py; here are ranks without a label and
the hops of a ring. float32, two layers, strong attention, 40 tokens
to a sequence, and a random number of valid labels a sample, so that ranks hold different numbers of
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from torchtitan.data.loader import Loader, Samples
from torchtitan.optim.loss import IGNORE_INDEX

pytestmark = pytest.mark.slow

NUM_LAYERS = 2
BASE = (
    "--model.flavor=tiny8",
    f"--model.num_layers={NUM_LAYERS}",
    "--training.seq_len=40",
    "--training.steps=2",
    "--training.local_batch_size=8",
)
CP2 = "--parallelism.context_parallel_degree=2"
CONTIGUOUS = "--parallelism.context_parallel_load_balancer=none"


@pytest.fixture
def job(tmp_path: Path, cache: Path) -> list[str]:
    return [*jobs.write_job(tmp_path, cache=cache), *BASE]


# --- a rank without any valid label


def train_on_the_second_half(job: list[str]) -> pj.Trained:
    """Mask the labels of the first half of every sequence: of two contiguous ranks, all of one."""
    correct = Loader.__next__

    def masked(self: Loader) -> list[Samples]:
        step = correct(self)
        for batch in step:
            batch["labels"][:, : batch["labels"].shape[1] // 2] = IGNORE_INDEX
        return step

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loader, "__next__", masked)
        return pj.train(job)


@pytest.mark.promise("cp", "loss")
@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_a_rank_whose_labels_are_all_masked(
    method: str, ranks: RankPool, job: list[str], on_one_device: OneDevice
) -> None:
    """Its keys and values count all the same: gradients come from the other rank."""
    reference = on_one_device(train_on_the_second_half, *BASE)
    how = [CP2, CONTIGUOUS, f"--parallelism.context_parallel_rotate_method={method}"]
    results = ranks.run(train_on_the_second_half, [*job, *how, UNSAVED], world=2)
    assert reference.rows[0]["valid_token_fraction"] < 0.5
    pj.assert_same_training(results, reference)
