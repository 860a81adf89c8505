"""Who holds which part of a sequence, and what each part has to attend to.

The sequence is cut into chunks of equal length. `headtail` gives rank r of n the chunks r and
2n - 1 - r: causal attention costs a chunk in proportion to its place, so a chunk near the head and
one near the tail make the same sum on every rank. `balanced` deals out smaller chunks by what they
cost in this very sequence (`balance.py`), which is even for documents of any lengths.
Without load balance rank r holds chunk r, and the last rank works 2n - 1 times as long as the
first.

A rank holds its chunks upwards. So of each document it holds a row of tokens without gaps, and one
rule covers all layouts: its own part of a document is attended to causally, and from a stretch of
queries all that another rank holds of their document before them is seen in full. A list of
rectangles says all that a mask would. Nothing here knows of devices or processes.

Chunks of a sequence dealt out to ranks, so that attention costs each the same.

A token attends to those of its document up to itself: its place there, counted from 1, is what it
costs. With documents of mixed lengths no fixed pattern is even, so the chunks of each sequence are
dealt out by what they cost. Each rank gets the same number of chunks, since memory must be even
too. The costliest go first, each to the rank with least so far that has room (Graham's rule of
longest processing time); then pairs are exchanged while that brings two ranks closer together.
It is a pure function of the lengths: every rank computes the same and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from torchtitan.mesh.settings import CHUNKS_A_RANK, Balancer
from torchtitan.models.interface import Documents
from torchtitan.parallel.execution import Batch

Ranges = tuple[tuple[int, int], ...]
"""Begin and end of stretches of a sequence, upwards."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys, by their places on the ranks that hold them, that meet in one kernel."""

    samples: slice
    """The sequences of the batch that it is part of."""
    rows: slice
    cols: slice
    causal: bool
    """Each query sees the keys up to its own place in the block; otherwise it sees all."""

    @property
    def places(self) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
        """Return where its queries and its keys stand in (batch, heads, tokens)."""
        return (self.samples, slice(None), self.rows), (self.samples, slice(None), self.cols)


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """Sequences of any length, a multiple of `num_chunks`, over `degree` ranks."""

    degree: int
    balancer: Balancer

    @property
    def chunks_a_rank(self) -> int:
        """Number of chunks that a rank holds."""
        return 1 if self.degree == 1 else CHUNKS_A_RANK[self.balancer]

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole sequence."""
        return self.degree * self.chunks_a_rank

    def chunks(self, rank: int, *, lengths: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the numbers of a rank's chunks, in the order in which it holds them: upwards.

        `lengths` are those of the sequence's documents, by which `balanced` goes.
        """
        if self.chunks_a_rank == 1:
            return (rank,)
        if self.balancer == "headtail":
            return (rank, self.num_chunks - 1 - rank)
        return deal(lengths, degree=self.degree, num_chunks=self.num_chunks)[rank]

    def ranges(self, rank: int, *, lengths: tuple[int, ...]) -> Ranges:
        """Return what a rank holds of a sequence; neighbouring chunks are one stretch."""
        length, rest = divmod(sum(lengths), self.num_chunks)
        assert not rest
        ranges: list[tuple[int, int]] = []
        for chunk in self.chunks(rank, lengths=lengths):
            start = chunk * length
            if ranges and ranges[-1][1] == start:
                start, _ = ranges.pop()
            ranges.append((start, (chunk + 1) * length))
        return tuple(ranges)

    def positions(self, rank: int, *, seq_len: int, documents: Documents | None = None) -> Tensor:
        """Return the places of a rank's tokens in their sequences, int64: (S), or (B, S) where
        each sequence is dealt out by its own documents."""
        each = documents is not None and self.balancer == "balanced"
        rows = documents.lengths if documents is not None and each else ((seq_len,),)
        held = [
            torch.cat([torch.arange(*stretch) for stretch in self.ranges(rank, lengths=lengths)])
            for lengths in rows
        ]
        return torch.stack(held) if each else held[0]

    def order(self) -> list[int]:
        """Return where chunk 0, 1 ... of the sequence stands among all ranks' chunks in a row."""
        assert self.balancer != "balanced", "sequences differ"
        held = [chunk for rank in range(self.degree) for chunk in self.chunks(rank)]
        return [held.index(chunk) for chunk in range(self.num_chunks)]

    def blocks(
        self, rank: int, *, source: int, seq_len: int, documents: Documents | None = None
    ) -> list[Block]:
        """Return what the queries of `rank` attend to among the keys of `source`.

        Without documents a block is one of all sequences of the batch.
        """
        if documents is None:
            return self._blocks_of((seq_len,), rank, source=source, samples=slice(None))
        return [
            block
            for row, lengths in enumerate(documents.lengths)
            for block in self._blocks_of(lengths, rank, source=source, samples=slice(row, row + 1))
        ]

    def _blocks_of(
        self, lengths: tuple[int, ...], rank: int, *, source: int, samples: slice
    ) -> list[Block]:
        """Return the blocks of one sequence."""
        own = self.ranges(rank, lengths=lengths)
        keys = self.ranges(source, lengths=lengths)
        blocks: list[Block] = []
        place = 0
        for begin, start, stop in _parts(own, lengths=lengths):
            first, place = place, place + stop - start
            if source == rank:
                # with what there is of the document before: causal as a whole
                first = _num_before(begin, keys)
                cols = slice(first, place)
                goes_on = bool(blocks) and blocks[-1].rows.start == first
            else:
                if begin == start:
                    continue  # nothing of the document before it
                cols = slice(_num_before(begin, keys), _num_before(start, keys))
                # neighbours that see the same: one kernel
                goes_on = bool(blocks) and blocks[-1].cols == cols
                first = blocks[-1].rows.start if goes_on else first
            if goes_on:
                blocks.pop()
            if cols.start < cols.stop:
                blocks.append(Block(samples, slice(first, place), cols, source == rank))
        return blocks


def find_blocks(
    layout: SequenceLayout, rank: int, source: int, seq_len: int, documents: Documents | None
) -> list[Block]:
    """Return `blocks`, remembered."""
    if documents is None:
        return _blocks_of_all(layout, rank, source, seq_len)
    return documents.cached(
        (layout, rank, source),
        lambda: layout.blocks(rank, source=source, seq_len=seq_len, documents=documents),
    )


@lru_cache(maxsize=1024)
def _blocks_of_all(layout: SequenceLayout, rank: int, source: int, seq_len: int) -> list[Block]:
    return layout.blocks(rank, source=source, seq_len=seq_len)


def _parts(ranges: Ranges, *, lengths: tuple[int, ...]) -> Iterator[tuple[int, int, int]]:
    """Yield each part of a document that lies in a range: the document's begin, its own, its
    end."""
    documents = pairwise(accumulate(lengths, initial=0))
    begin, end = next(documents)
    for start, stop in ranges:
        while start < stop:
            while end <= start:
                begin, end = next(documents)
            yield begin, start, min(end, stop)
            start = min(end, stop)


def _num_before(place: int, ranges: Ranges) -> int:
    """Count the tokens in ranges before a place of the sequence."""
    return sum(min(stop, place) - start for start, stop in ranges if start < place)


class SequenceShard:
    """The one place where tokens, labels and positions are cut to a rank's part of the sequence."""

    def __init__(
        self,
        layout: SequenceLayout,
        *,
        rank: int,
        attn_mask_type: Literal["causal", "block_causal"] = "causal",
        reset_positions: bool = False,
    ) -> None:
        self._layout, self._rank = layout, rank
        self._separates = attn_mask_type == "block_causal"
        self._restarts = reset_positions

    def take(self, samples: Mapping[str, Tensor]) -> Batch:
        """Return the rank's part of whole sequences: `tokens` and `labels`, int64 (B, S).

        Where documents matter there are `document_lengths` too, those of all sequences in a row,
        and where samples are padded `length`, the number of tokens before the padding, int64 (B).
        """
        tokens_BS, labels_BS = samples["tokens"], samples["labels"]
        seq_len = tokens_BS.shape[1]
        documents = None
        if self._separates or self._restarts:
            documents = Documents.from_flat(samples["document_lengths"], seq_len=seq_len)
        separated = documents if self._separates else None
        places = self._layout.positions(self._rank, seq_len=seq_len, documents=separated)
        positions = places
        if documents is not None and self._restarts:
            positions = _pick(documents.positions(), places)
        lengths = samples.get("length")
        return Batch(
            tokens=_pick(tokens_BS, places),
            labels=_pick(labels_BS, places),
            positions=positions,
            documents=separated,
            places=None if lengths is None else places,
            lengths=lengths,
        )


def _pick(x_BS: Tensor, places: Tensor) -> Tensor:
    """Take the tokens at the same places of each sequence, or at those of its own."""
    if places.shape[-1] == x_BS.shape[1]:
        return x_BS  # all of it, in its order, in page-locked memory if it is there
    return x_BS.index_select(1, places) if places.ndim == 1 else x_BS.gather(1, places)


EVEN_ENOUGH = 1000
"""No exchanges where the busiest rank has less than this part of the mean above it."""


def chunk_costs(lengths: Sequence[int], *, num_chunks: int) -> list[int]:
    """Return the pairs of a query and a key that each chunk of a sequence makes."""
    seq_len = sum(lengths)
    assert seq_len % num_chunks == 0
    cuts = range(0, seq_len + 1, seq_len // num_chunks)
    ends = list(accumulate(lengths, initial=0))
    pairs_until: list[int] = []
    whole, document = 0, 0  # the pairs of all documents before this one
    for cut in cuts:
        while document < len(lengths) and ends[document + 1] <= cut:
            whole += _pairs(lengths[document])
            document += 1
        pairs_until.append(whole + _pairs(cut - ends[document]))
    return [after - before for before, after in pairwise(pairs_until)]


def _pairs(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2


@lru_cache(maxsize=1024)
def deal(lengths: tuple[int, ...], *, degree: int, num_chunks: int) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of each rank, upwards, for a sequence of documents of these lengths."""
    costs = chunk_costs(lengths, num_chunks=num_chunks)
    room = num_chunks // degree
    hands: list[list[int]] = [[] for _ in range(degree)]
    sums = [0] * degree
    for chunk in sorted(range(num_chunks), key=lambda chunk: -costs[chunk]):
        rank = min((r for r in range(degree) if len(hands[r]) < room), key=lambda r: sums[r])
        hands[rank].append(chunk)
        sums[rank] += costs[chunk]
    while _exchange(hands, sums, costs):
        pass
    return tuple(tuple(sorted(hand)) for hand in hands)


def _exchange(hands: list[list[int]], sums: list[int], costs: Sequence[int]) -> bool:
    """Exchange the pair of chunks, one of the busiest rank's, that brings it closest to another;
    tell whether there was any."""
    busiest = max(range(len(hands)), key=lambda rank: sums[rank])
    if (sums[busiest] * len(sums) - sum(sums)) * EVEN_ENOUGH <= sum(sums):
        return False
    best: tuple[int, int, int, int] | None = None
    for rank in sorted(range(len(hands)), key=lambda rank: sums[rank]):
        gap = sums[busiest] - sums[rank]
        for i, given in enumerate(hands[busiest]):
            for j, taken in enumerate(hands[rank]):
                less = costs[given] - costs[taken]
                # both stay below what the busiest had, so that this ends
                if 0 < less < gap and (best is None or abs(gap - 2 * less) < best[0]):
                    best = abs(gap - 2 * less), rank, i, j
    if best is None:
        return False
    _, rank, i, j = best
    given, taken = hands[busiest][i], hands[rank][j]
    hands[busiest][i], hands[rank][j] = taken, given
    sums[busiest] -= costs[given] - costs[taken]
    sums[rank] += costs[given] - costs[taken]
    return True
