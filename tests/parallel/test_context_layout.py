"""Who holds what and attends to what, against masks written out in full."""

from __future__ import annotations

from typing import Literal, get_args

import pytest
import torch

from torchtitan.mesh.settings import Balancer
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
                ones = torch.ones(len(rows), len(cols), dtype=torch.int64)
                met[sample, rows[:, None], cols] += ones.tril() if block.causal else ones
    return met


@pytest.mark.promise("cp")
@pytest.mark.parametrize("lengths", DOCUMENTS.values(), ids=DOCUMENTS.keys())
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_causal_pair_meets_once(
    layout: SequenceLayout, lengths: tuple[tuple[int, ...], ...] | None
) -> None:
    """Of each document, where there are any."""
    documents = None if lengths is None else Documents(lengths)
    met = sum(
        seen_pairs(layout, rank, seq_len=SEQ_LEN, documents=documents)
        for rank in range(layout.degree)
    )
    assert torch.equal(met, torch.stack([mask(row) for row in lengths or ((SEQ_LEN,),)]))


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


def test_few_kernels() -> None:
    """Neighbours that see the same keys share one, and what is masked in full has none."""

    def count(balancer: Balancer, rank: int) -> list[int]:
        layout = SequenceLayout(degree=4, balancer=balancer)
        return [len(layout.blocks(rank, source=n, seq_len=24)) for n in range(4)]

    assert all(count("headtail", rank) == [1, 1, 1, 1] for rank in range(4))
    assert [count("none", rank) for rank in (0, 1, 3)] == [[1, 0, 0, 0], [1, 1, 0, 0], [1] * 4]


@pytest.mark.promise("cp")
def test_a_batch_and_the_positions_are_cut_alike() -> None:
    shard = SequenceShard(SequenceLayout(degree=2, balancer="headtail"), rank=1)
    tokens = torch.arange(16).view(2, 8)
    part = shard.take({"tokens": tokens, "labels": tokens + 100})
    assert part.positions.tolist() == [2, 3, 4, 5]
    assert part.is_text() is None
    assert part.tokens.tolist() == [[2, 3, 4, 5], [10, 11, 12, 13]]
    assert torch.equal(part.labels, part.tokens + 100)


def test_one_rank_takes_all() -> None:
    tokens = torch.arange(16).view(2, 8)
    layout = SequenceLayout(degree=1, balancer="headtail")
    part = SequenceShard(layout, rank=0).take({"tokens": tokens, "labels": tokens + 100})
    assert torch.equal(part.tokens, tokens)
    assert torch.equal(part.labels, tokens + 100)
    assert part.positions.tolist() == list(range(8))


LENGTHS = torch.tensor([3, 5, 8, 1, 1, 6])  # of three sequences


@pytest.mark.parametrize("attention", ["causal", "block_causal"])
@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("balancer", get_args(Balancer))
def test_documents_are_told_apart_before_they_are_cut(
    balancer: Balancer,
    attention: Literal["causal", "block_causal"],
    positions: bool,
) -> None:
    seq_len, degree = 16, 2
    lengths, tokens = LENGTHS * 2, torch.arange(3 * seq_len).view(3, -1)
    samples = {"tokens": tokens, "labels": tokens + 100, "document_lengths": lengths}
    samples["length"] = num_text = torch.tensor([5, seq_len, 1])
    # each token's place in its document, by its number in the row of all
    places = torch.cat([torch.arange(n) for n in lengths.tolist()])
    layout = SequenceLayout(degree=degree, balancer=balancer)
    seen = []
    for rank in range(degree):
        shard = SequenceShard(
            layout, rank=rank, attn_mask_type=attention, reset_positions=positions
        )
        part = shard.take(samples)
        wanted = places[part.tokens] if positions else part.tokens % seq_len
        assert torch.equal(part.positions.expand(3, -1), wanted)
        assert torch.equal(part.labels, part.tokens + 100)
        is_text = part.tokens % seq_len < num_text[:, None]
        for rows, cut in zip(is_text.split(2), part.split(2), strict=True):
            assert torch.equal(cut.is_text(), rows)
        told = None if part.documents is None else part.documents.lengths
        assert told == (((6, 10), (16,), (2, 2, 12)) if attention == "block_causal" else None)
        seen.append(part.tokens)
    assert torch.equal(torch.cat(seen, 1).sort().values, tokens)


def test_any_length_on_one_rank() -> None:
    for balancer in get_args(Balancer):
        layout = SequenceLayout(degree=1, balancer=balancer)
        assert layout.positions(0, seq_len=7).tolist() == list(range(7))
