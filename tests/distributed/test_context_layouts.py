"""Jobs whose ranks share each sequence train the model of one device.

float32, eight layers, a random number of valid labels a sample (so that ranks hold different
numbers of them), 40 tokens to a sequence, and the same global batch: rounding is all that may
differ, as in `test_layouts.py`. The weights of attention start ten times as large as they should:
at the real size it is so even at first, and adds so little, that a wrong position is lost in
rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_elastic import LOGGED, samples
from tests.distributed.test_layouts import assert_same_training
from torchtitan.data.loader import Loader, Samples
from torchtitan.models import llama3
from torchtitan.models.decoder import Block
from torchtitan.models.init import Init, Normal
from torchtitan.models.spec import DecoderConfig
from torchtitan.optim.loss import IGNORE_INDEX
from torchtitan.parallel.batch import Batch
from torchtitan.parallel.context import attention as context_attention
from torchtitan.parallel.context.layout import SequenceLayout, SequenceShard

BASE = (
    "--model.flavor=tiny8",
    "--training.seq_len=40",
    "--training.steps=10",
    "--training.local_batch_size=8",
)
CP2 = "--parallelism.context_parallel_degree=2"
CP4 = "--parallelism.context_parallel_degree=4"
RING, ULYSSES = (f"--parallelism.context_parallel_rotate_method={m}" for m in ("ring", "ulysses"))
CONTIGUOUS = "--parallelism.context_parallel_load_balancer=none"
KEPT = "--parallelism.fsdp_reshard_after_forward=never"
HALF = "--training.local_batch_size=4"
REPLICATE = "--parallelism.data_parallel_replicate_degree=2"

LAYOUTS = {
    "cp 2, allgather": (2, (CP2,)),
    "cp 2, ring": (2, (CP2, RING, "--training.loss_chunks=3")),
    "cp 2, ulysses": (2, (CP2, ULYSSES)),
    "cp 4, ring": (4, (CP4, RING)),
    "cp 4, ulysses": (4, (CP4, ULYSSES)),
    "cp 4, allgather, contiguous": (4, (CP4, CONTIGUOUS)),
    "cp 2, ulysses, contiguous": (2, (CP2, ULYSSES, CONTIGUOUS)),
    "cp 2 x fsdp 2, ring": (4, (CP2, RING, HALF)),
    "cp 2 x fsdp 2, allgather, kept": (4, (CP2, KEPT, HALF)),
    "cp 2 x ddp 2, ring": (4, (CP2, RING, REPLICATE, HALF)),
    "cp 2, ring, recomputed": (2, (CP2, RING, "--activation_checkpoint.mode=full")),
    "cp 2, allgather, recomputed in part": (2, (CP2, "--activation_checkpoint.mode=selective")),
    "cp 2, ring, accumulating": (2, (CP2, RING, "--training.local_batch_size=2")),
}


def train(job: list[str]) -> jobs.Result:
    """Run a job in which it matters much what attends to what."""
    correct = llama3.initial

    def initial(config: DecoderConfig, name: str) -> Init:
        return Normal(std=0.2) if ".attention.w" in name else correct(config, name)

    llama3.initial = initial
    try:
        return jobs.train(job)
    finally:
        llama3.initial = correct


@pytest.fixture(scope="module")
def on_one_device(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> jobs.Result:
    job = jobs.write_job(tmp_path_factory.mktemp("one"), cache=cache)
    [result] = ranks.run(train, [*job, *BASE], world=1)
    return result


@pytest.fixture
def job(tmp_path: Path, cache: Path) -> list[str]:
    return [*jobs.write_job(tmp_path, cache=cache), *BASE]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_model(
    layout: str, ranks: RankPool, job: list[str], on_one_device: jobs.Result
) -> None:
    world, overrides = LAYOUTS[layout]
    result = ranks.run(train, [*job, *overrides], world=world)[0]
    assert all(torch.equal(result.initial[n], w) for n, w in on_one_device.initial.items())
    assert_same_training(result, on_one_device)


def test_bfloat16(ranks: RankPool, job: list[str], on_one_device: jobs.Result) -> None:
    """Within the rounding of bfloat16, 2^-8, of float32, as one device is."""
    bf16 = "--training.mixed_precision_param=bfloat16"
    result = ranks.run(train, [*job, CP2, RING, bf16], world=2)[0]
    exact = [row["loss"] for row in on_one_device.rows]
    losses = [row["loss"] for row in result.rows]
    assert losses == pytest.approx(exact, rel=2**-8)
    assert losses != pytest.approx(exact, rel=1e-6)


# --- a rank without any valid label


def train_on_the_second_half(job: list[str]) -> jobs.Result:
    """Mask the labels of the first half of every sequence: of two contiguous ranks, all of one."""
    correct = Loader.__next__

    def masked(self: Loader) -> list[Samples]:
        step = correct(self)
        for batch in step:
            batch["labels"][:, : batch["labels"].shape[1] // 2] = IGNORE_INDEX
        return step

    Loader.__next__ = masked  # type: ignore[method-assign]
    try:
        return train(job)
    finally:
        Loader.__next__ = correct  # type: ignore[method-assign]


@pytest.mark.parametrize("method", ["allgather", "ring", "ulysses"])
def test_a_rank_whose_labels_are_all_masked(
    method: str, ranks: RankPool, tmp_path: Path, cache: Path
) -> None:
    """Its keys and values count all the same: gradients come from the other rank."""
    alone, split = (
        [*jobs.write_job(tmp_path, name=name, cache=cache), *BASE, "--training.steps=4"]
        for name in ("alone", "split")
    )
    [reference] = ranks.run(train_on_the_second_half, alone, world=1)
    how = [CP2, CONTIGUOUS, f"--parallelism.context_parallel_rotate_method={method}"]
    result = ranks.run(train_on_the_second_half, [*split, *how], world=2)[0]
    assert reference.rows[0]["valid_token_fraction"] < 0.5
    assert_same_training(result, reference)


# --- planted bugs


def with_local_positions(job: list[str]) -> jobs.Result:
    correct = SequenceShard.take

    def take(self: SequenceShard, samples: Samples) -> Batch:
        part = correct(self, samples)
        return replace(part, positions=torch.arange(len(part.positions)))

    SequenceShard.take = take  # type: ignore[method-assign,assignment]
    try:
        return train(job)
    finally:
        SequenceShard.take = correct  # type: ignore[method-assign]


def with_whole_labels_on_each(job: list[str]) -> jobs.Result:
    """Cut the labels as if the layout were the other one."""
    correct = SequenceShard.take

    def take(self: SequenceShard, samples: Samples) -> Batch:
        part = correct(self, samples)
        other = SequenceShard(SequenceLayout(degree=2, balancer="none"), rank=self._rank)
        return replace(part, labels=correct(other, samples).labels)

    SequenceShard.take = take  # type: ignore[method-assign,assignment]
    try:
        return train(job)
    finally:
        SequenceShard.take = correct  # type: ignore[method-assign]


def with_attention_of_its_own(job: list[str]) -> jobs.Result:
    """Forget the other ranks' keys."""
    correct = context_attention.Ranks.blocks

    def blocks(self: context_attention.Ranks, source: int, **given: object) -> list[object]:
        return correct(self, source, **given) if source == self.rank else []  # type: ignore

    context_attention.Ranks.blocks = blocks  # type: ignore[method-assign,assignment]
    try:
        return train(job)
    finally:
        context_attention.Ranks.blocks = correct  # type: ignore[method-assign]


@pytest.mark.parametrize(
    "bug", [with_local_positions, with_whole_labels_on_each, with_attention_of_its_own]
)
def test_a_planted_bug_is_seen(
    bug: Callable[[list[str]], jobs.Result],
    ranks: RankPool,
    job: list[str],
    on_one_device: jobs.Result,
) -> None:
    result = ranks.run(bug, [*job, CP2, RING, "--training.steps=3"], world=2)[0]
    for ours, correct in zip(result.rows, on_one_device.rows[:3], strict=True):
        assert ours["grad_norm"] != pytest.approx(correct["grad_norm"], rel=1e-3)


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

    context_attention.Message.__init__ = init  # type: ignore[method-assign,assignment]
    Block.forward = block  # type: ignore[method-assign,assignment]
    try:
        train(job)
    finally:
        context_attention.Message.__init__ = correct  # type: ignore[method-assign]
        Block.forward = forward  # type: ignore[method-assign]
    return calls


@pytest.mark.parametrize(
    ("mode", "option", "blocks", "attentions"),
    [("none", "2", 0, 0), ("full", "2", 8, 8), ("selective", "2", 4, 4), ("selective", "op", 8, 0)],
    ids=lambda x: str(x),
)
def test_recomputed_blocks_repeat_their_hops_on_all_ranks_alike(
    mode: str, option: str, blocks: int, attentions: int, ranks: RankPool, job: list[str]
) -> None:
    recomputing = {"mode": mode, "selective_ac_option": option}
    how = [f"--activation_checkpoint.{key}={value}" for key, value in recomputing.items()]
    calls = ranks.run(count_hops, [*job, CP4, RING, *how, "--training.steps=1"], world=4)
    assert all(own == calls[0] for own in calls)
    assert calls[0].count("block") == 8 + blocks
    # 3 hops forward, 3 + 4 backward: gradients take one more to come home
    assert calls[0].count("hop") == (8 + attentions) * 3 + 8 * 7


# --- checkpoints


def test_another_degree_goes_on_at_the_next_sample(
    ranks: RankPool, job: list[str], tmp_path: Path, on_one_device: jobs.Result
) -> None:
    """cp 2 -> cp 4 -> one device -> cp 2 x fsdp 2, each sample logged once."""
    for world, steps, layout in (
        (2, 2, [CP2]),
        (4, 5, [CP4, RING]),
        (1, 7, []),
        (4, 10, [CP2, HALF]),
    ):
        result, *_ = ranks.run(
            train, [*job, LOGGED, *layout, f"--training.steps={steps}"], world=world
        )
    assert_same_training(result, on_one_device)
    drawn = samples(tmp_path / "run")
    assert [number for number, _, _ in drawn] == list(range(10 * 8))


def test_resume_is_exact(ranks: RankPool, tmp_path: Path, cache: Path) -> None:
    through, stopped = (
        [*jobs.write_job(tmp_path, name=name, cache=cache), *BASE, CP2, RING]
        for name in ("through", "stopped")
    )
    whole = ranks.run(train, [*through, "--training.steps=4"], world=2)
    ranks.run(train, [*stopped, "--training.steps=2"], world=2)
    resumed = ranks.run(train, [*stopped, "--training.steps=4"], world=2)
    assert [result.state_hash for result in resumed] == [result.state_hash for result in whole]
