"""Who holds what and attends to what, against masks written out in full."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import get_args

import pytest
import torch

from torchtitan.mesh.settings import Balancer
from torchtitan.models import attention
from torchtitan.models.attention import window_block
from torchtitan.models.interface import Documents
from torchtitan.parallel.context.layout import SequenceLayout
from torchtitan.parallel.context.shard import SequenceShard

LAYOUTS = [
    SequenceLayout(degree=degree, balancer=balancer)
    for degree in (1, 2, 3, 4)
    for balancer in get_args(Balancer)
]


SEQ_LEN = 96  # 8 chunks for each of 1, 2, 3, 4 ranks
DOCUMENTS = {
    "none": None,
    "one": ((SEQ_LEN,),),
    "single tokens": ((1,) * SEQ_LEN,),
    "boundaries in chunks": ((3, 58, 1, 1, 20, 13), (95, 1), (1, 95), (50, 46)),
}


def seen_pairs(
    layout: SequenceLayout, rank: int, *, seq_len: int = 24, documents: Documents | None = None
) -> torch.Tensor:
    """How often the blocks of a rank bring each query and key of each sequence together."""
    num = 1 if documents is None else len(documents.lengths)

    def places(rank: int) -> torch.Tensor:
        found = layout.positions(rank, seq_len=seq_len, documents=documents)
        return found.expand(num, -1)

    met = torch.zeros(num, seq_len, seq_len, dtype=torch.int64)
    queries = places(rank)
    for source in range(layout.degree):
        keys = places(source)
        for block in layout.blocks(rank, source=source, seq_len=seq_len, documents=documents):
            for sample in range(num)[block.samples]:
                rows, cols = queries[sample, block.rows], keys[sample, block.cols]
                low, high = block.band or (-seq_len, 0 if block.causal else seq_len)
                seen = torch.ones(len(rows), len(cols), dtype=torch.int64).triu(low).tril(high)
                assert seen.any(1).all(), "kernels return NaN for a query without keys"
                met[sample, rows[:, None], cols] += seen
    return met


@pytest.mark.promise("cp")
@pytest.mark.parametrize("window", [None, 1, 5, 26, 60])
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_causal_pair_meets_once(
    layout: SequenceLayout,
    lengths: tuple[tuple[int, ...], ...] | None,
    window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of each document, where there are any, and each window."""
    monkeypatch.setattr(attention, "MIN_WINDOW_BLOCK", 10)
    layout = replace(layout, window=window)
    documents = None if lengths is None else Documents(lengths)
    met = sum(
        seen_pairs(layout, rank, seq_len=SEQ_LEN, documents=documents)
        for rank in range(layout.degree)
    )
    expected = torch.stack([mask(row) for row in lengths or ((SEQ_LEN,),)])
    assert torch.equal(met, expected if window is None else expected.triu(1 - window))


@pytest.mark.promise("no-square")
@pytest.mark.parametrize("window", [100, 1600])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_window_bounds_the_products_per_token(layout: SequenceLayout, window: int) -> None:
    layout = replace(layout, window=window)
    for seq_len in (4800, 19_200):
        blocks = [
            block
            for rank, source in product(range(layout.degree), repeat=2)
            for block in layout.blocks(rank, source=source, seq_len=seq_len)
        ]
        sizes = [[s.stop - s.start for s in (block.rows, block.cols)] for block in blocks]
        products = sum(rows * cols for rows, cols in sizes)
        assert window / 2 < products / seq_len < window + window_block(window)


def mask(lengths: tuple[int, ...]) -> torch.Tensor:
    """All pairs of one sequence that may meet, written out."""
    number = torch.arange(len(lengths)).repeat_interleave(torch.tensor(lengths))
    return (number[:, None] == number).long().tril()


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_hold_each_token_once(layout: SequenceLayout) -> None:
    documents = Documents(DOCUMENTS["boundaries in chunks"] or ())
    held = [
        layout.positions(rank, seq_len=SEQ_LEN, documents=documents).expand(4, -1)
        for rank in range(layout.degree)
    ]
    assert torch.equal(torch.cat(held, 1).sort().values, torch.arange(SEQ_LEN).expand(4, -1))
    assert all((part.diff() > 0).all() for part in held)
    if layout.balancer == "balanced":
        by_its_own = not torch.equal(held[0][0], held[0][1])
        assert by_its_own == (layout.degree > 1)
        return
    held = [layout.positions(rank, seq_len=24) for rank in range(layout.degree)]
    chunks = torch.cat(held).view(layout.num_chunks, -1)
    assert torch.cat([chunks[place] for place in layout.order()]).tolist() == list(range(24))


@pytest.mark.parametrize("degree", [2, 4, 8])
def test_all_ranks_have_the_same_work(degree: int) -> None:
    """In pairs of a query and a key; without balance the last rank has far more than the first."""

    def work(balancer: Balancer) -> list[int]:
        layout = SequenceLayout(degree=degree, balancer=balancer)
        pairs = [seen_pairs(layout, rank, seq_len=48 * degree) for rank in range(degree)]
        return [int(met.sum()) for met in pairs]

    headtail, balanced, contiguous = work("headtail"), work("balanced"), work("none")
    assert max(headtail) == min(headtail) == max(balanced) == min(balanced)
    assert sum(balanced) == sum(contiguous) == 48 * degree * (48 * degree + 1) // 2
    assert max(contiguous) > 2 * min(contiguous)


@pytest.mark.promise("cp")
def test_a_batch_and_the_positions_are_cut_alike() -> None:
    shard = SequenceShard(SequenceLayout(degree=2, balancer="headtail"), rank=1)
    tokens = torch.arange(16).view(2, 8)
    part = shard.take({"tokens": tokens, "labels": tokens + 100})
    assert part.positions.tolist() == [2, 3, 4, 5]
    assert part.is_text() is None
    assert part.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(part.labels, part.tokens + 100)
