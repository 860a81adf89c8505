"""Jobs whose ranks share each sequence: what they must not get wrong, and what they repeat.

That they train the model of one device is in test_matrix.py; here are ranks without a label and
the hops of a ring. float32, two layers, strong attention, 40 tokens
to a sequence, and a random number of valid labels a sample, so that ranks hold different numbers of
them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

from tests.distributed import jobs
from tests.distributed import pipeline_jobs as pj
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.jobs import UNSAVED
from torchtitan.data.loader import Loader, Samples
from torchtitan.models.decoder import Block
from torchtitan.optim.loss import IGNORE_INDEX
from torchtitan.parallel.context import attention as context_attention

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
CP4 = "--parallelism.context_parallel_degree=4"
RING = "--parallelism.context_parallel_rotate_method=ring"
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


# --- recomputation


def count_hops(job: list[str]) -> list[str]:
    """What one step of this rank does on the ring, layer by layer."""
    calls: list[str] = []
    correct = context_attention.Message.__init__
    forward = Block.forward

    def init(self: context_attention.Message, tensor: Tensor, **arguments: object) -> None:
        calls.append("hop")
        correct(self, tensor, **arguments)  # type: ignore[arg-type]

    def block(self: Block, *arguments: object) -> Tensor:
        calls.append("block")
        return forward(self, *arguments)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(context_attention.Message, "__init__", init)
        patch.setattr(Block, "forward", block)
        pj.train(job)
    return calls


@pytest.mark.parametrize(
    ("mode", "option", "blocks", "attentions"),
    [("none", "2", 0, 0), ("full", "2", 2, 2), ("selective", "2", 1, 1), ("selective", "op", 2, 0)],
    ids=lambda x: str(x),
)
def test_recomputed_blocks_repeat_their_hops_on_all_ranks_alike(
    mode: str, option: str, blocks: int, attentions: int, ranks: RankPool, job: list[str]
) -> None:
    recomputing = {"mode": mode, "selective_ac_option": option}
    how = [f"--activation_checkpoint.{key}={value}" for key, value in recomputing.items()]
    calls = ranks.run(count_hops, [*job, CP4, RING, *how, "--training.steps=1", UNSAVED], world=4)
    assert all(own == calls[0] for own in calls)
    assert calls[0].count("block") == NUM_LAYERS + blocks
    # 3 hops forward, 3 + 4 backward: gradients take one more to come home
    assert calls[0].count("hop") == (NUM_LAYERS + attentions) * 3 + NUM_LAYERS * 7
