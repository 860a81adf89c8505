"""Who holds what and attends to what, against masks written out in full."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from torchtitan.parallel.context_layout import Balancer, SequenceLayout, SequenceShard

LAYOUTS = [
    SequenceLayout(degree=degree, balancer=balancer, seq_len=24)
    for degree in (1, 2, 3, 4)
    for balancer in get_args(Balancer)
]


def seen_pairs(layout: SequenceLayout, rank: int) -> torch.Tensor:
    """How often the blocks of a rank bring each query and key of the sequence together."""
    met = torch.zeros(layout.seq_len, layout.seq_len, dtype=torch.int64)
    queries = layout.positions(rank)
    for source in range(layout.degree):
        keys = layout.positions(source)
        for block in layout.blocks(rank, source=source):
            rows, cols = queries[block.rows], keys[block.cols]
            ones = torch.ones(len(rows), len(cols), dtype=torch.int64)
            met[rows[:, None], cols] += ones.tril() if block.causal else ones
    return met


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_causal_pair_meets_once(layout: SequenceLayout) -> None:
    met = sum(seen_pairs(layout, rank) for rank in range(layout.degree))
    assert torch.equal(met, torch.ones_like(met).tril())


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_hold_each_token_once(layout: SequenceLayout) -> None:
    held = [layout.positions(rank) for rank in range(layout.degree)]
    assert sorted(torch.cat(held).tolist()) == list(range(24))
    chunks = torch.cat(held).view(layout.num_chunks, -1)
    assert torch.cat([chunks[place] for place in layout.order()]).tolist() == list(range(24))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_headtail_gives_all_ranks_the_same_work(degree: int) -> None:
    """In pairs of a query and a key; without balance the last rank has far more than the first."""

    def work(balancer: Balancer) -> list[int]:
        layout = SequenceLayout(degree=degree, balancer=balancer, seq_len=48 * degree)
        return [int(seen_pairs(layout, rank).sum()) for rank in range(degree)]

    balanced, contiguous = work("headtail"), work("none")
    assert max(balanced) <= 1.01 * min(balanced)
    assert sum(balanced) == sum(contiguous) == 48 * degree * (48 * degree + 1) // 2
    assert max(contiguous) > 2 * min(contiguous)


def test_few_kernels() -> None:
    """Neighbours that see the same keys share one, and what is masked in full has none."""
    layout = SequenceLayout(degree=4, balancer="headtail", seq_len=24)
    assert all(
        len(layout.blocks(rank, source=source)) == 1 for rank in range(4) for source in range(4)
    )
    contiguous = SequenceLayout(degree=4, balancer="none", seq_len=24)
    assert [len(contiguous.blocks(1, source=source)) for source in range(4)] == [1, 1, 0, 0]


def test_a_batch_and_the_positions_are_cut_alike() -> None:
    layout = SequenceLayout(degree=2, balancer="headtail", seq_len=8)
    tokens = torch.arange(16).view(2, 8)
    shard = SequenceShard(layout, rank=1, device=torch.device("cpu"))
    assert shard.positions_S.tolist() == [2, 3, 4, 5]
    part = shard.take({"tokens": tokens, "labels": tokens + 100})
    assert part["tokens"].tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(part["labels"], part["tokens"] + 100)


def test_one_rank_takes_all() -> None:
    layout = SequenceLayout(degree=1, balancer="headtail", seq_len=8)
    shard = SequenceShard(layout, rank=0, device=torch.device("cpu"))
    tokens = torch.arange(16).view(2, 8)
    assert shard.take({"tokens": tokens})["tokens"] is tokens
    assert shard.positions_S.tolist() == list(range(8))
