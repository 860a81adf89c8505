"""Who holds what and attends to what, against masks written out in full."""

from __future__ import annotations

from typing import get_args

import pytest
import torch

from torchtitan.parallel.context_layout import Balancer, SequenceLayout, SequenceShard

LAYOUTS = [
    SequenceLayout(degree=degree, balancer=balancer)
    for degree in (1, 2, 3, 4)
    for balancer in get_args(Balancer)
]


def seen_pairs(layout: SequenceLayout, rank: int, *, seq_len: int = 24) -> torch.Tensor:
    """How often the blocks of a rank bring each query and key of the sequence together."""
    met = torch.zeros(seq_len, seq_len, dtype=torch.int64)
    queries = layout.positions(rank, seq_len=seq_len)
    for source in range(layout.degree):
        keys = layout.positions(source, seq_len=seq_len)
        for block in layout.blocks(rank, source=source, num_tokens=len(queries)):
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
    held = [layout.positions(rank, seq_len=24) for rank in range(layout.degree)]
    assert sorted(torch.cat(held).tolist()) == list(range(24))
    chunks = torch.cat(held).view(layout.num_chunks, -1)
    assert torch.cat([chunks[place] for place in layout.order()]).tolist() == list(range(24))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_headtail_gives_all_ranks_the_same_work(degree: int) -> None:
    """In pairs of a query and a key; without balance the last rank has far more than the first."""

    def work(balancer: Balancer) -> list[int]:
        layout = SequenceLayout(degree=degree, balancer=balancer)
        pairs = [seen_pairs(layout, rank, seq_len=48 * degree) for rank in range(degree)]
        return [int(met.sum()) for met in pairs]

    balanced, contiguous = work("headtail"), work("none")
    assert max(balanced) <= 1.01 * min(balanced)
    assert sum(balanced) == sum(contiguous) == 48 * degree * (48 * degree + 1) // 2
    assert max(contiguous) > 2 * min(contiguous)


def test_few_kernels() -> None:
    """Neighbours that see the same keys share one, and what is masked in full has none."""

    def count(balancer: Balancer, rank: int) -> list[int]:
        layout = SequenceLayout(degree=4, balancer=balancer)
        return [len(layout.blocks(rank, source=n, num_tokens=6)) for n in range(4)]

    assert all(count("headtail", rank) == [1, 1, 1, 1] for rank in range(4))
    assert [count("none", rank) for rank in (0, 1, 3)] == [[1, 0, 0, 0], [1, 1, 0, 0], [1] * 4]


def test_a_batch_and_the_positions_are_cut_alike() -> None:
    shard = SequenceShard(SequenceLayout(degree=2, balancer="headtail"), rank=1)
    tokens = torch.arange(16).view(2, 8)
    part = shard.take({"tokens": tokens, "labels": tokens + 100})
    assert part.positions.tolist() == [2, 3, 4, 5]
    assert part.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(part.labels, part.tokens + 100)


def test_one_rank_takes_all() -> None:
    tokens = torch.arange(16).view(2, 8)
    layout = SequenceLayout(degree=1, balancer="headtail")
    part = SequenceShard(layout, rank=0).take({"tokens": tokens, "labels": tokens + 100})
    assert torch.equal(part.tokens, tokens)
    assert torch.equal(part.labels, tokens + 100)
    assert part.positions.tolist() == list(range(8))
