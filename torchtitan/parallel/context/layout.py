"""The division of each sequence over the ranks of context parallelism, as pure arithmetic.

The sequence is cut into chunks of equal length:

    headtail  rank r of n holds chunks r and 2n - 1 - r. Under causal attention the cost of a chunk
              grows with its position, so one near the head and one near the tail add up to the same
              sum on every rank
    balanced  smaller chunks are assigned by their cost in each sequence, which balances documents
              of any lengths
    none      rank r holds chunk r. The last rank works 2n - 1 times as long as the first

Each rank holds its chunks in ascending order, so its part of a document is a row of tokens without
gaps. One rule then covers all layouts: a rank attends causally to its own part of a document, and a
stretch of its queries attends fully to all earlier tokens of their document on another rank. A list
of rectangles takes the place of a mask. Nothing in this file knows of devices or processes.

With a window, queries are cut into blocks of `window_block` tokens. All queries of a block see the
nearest keys before it, and only the first queries see the other keys, through a mask.

**Balancing.** A token attends to the tokens of its document up to itself, so its cost is its
position in the document, counted from 1. No fixed pattern is even for documents of mixed lengths,
so chunks are assigned by cost, the same number to each rank because memory must be even too. The
most expensive chunks are assigned first, each to the rank with the smallest sum that has room
(Graham's longest processing time rule). Then pairs of chunks are swapped while that brings two
ranks closer together. The result is a pure function of the lengths, so every rank computes it
without communication.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise, product

import torch
from torch import Tensor

from torchtitan.mesh.settings import CHUNKS_A_RANK, Balancer, ParallelismConfig
from torchtitan.models.attention import window_block
from torchtitan.models.interface import Documents
from torchtitan.models.kernels import Band

Ranges = tuple[tuple[int, int], ...]
"""Start and end of stretches of a sequence, in ascending order."""


@dataclass(frozen=True, slots=True)
class Block:
    """Queries and keys of one kernel call, by their indices on the ranks that hold them."""

    samples: slice
    """The sequences of the batch that the block covers."""
    rows: slice
    cols: slice
    causal: bool
    """Each query attends to the keys up to its own index in the block. Otherwise to all keys."""
    band: Band | None = None

    @property
    def slices(self) -> tuple[tuple[slice, slice, slice], tuple[slice, slice, slice]]:
        """Return the slices of its queries and of its keys in (batch, heads, tokens)."""
        return (self.samples, slice(None), self.rows), (self.samples, slice(None), self.cols)


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """Division of sequences, of any multiple of `num_chunks` tokens, over `degree` ranks."""

    degree: int
    balancer: Balancer
    window: int | None = None
    """Number of keys that a query attends to, itself included. None: all up to itself."""

    @classmethod
    def from_config(cls, parallelism: ParallelismConfig) -> SequenceLayout:
        """Return the layout of the settings. With one rank it is the full sequence."""
        return cls(
            degree=parallelism.context_parallel_degree,
            balancer=parallelism.context_parallel_load_balancer,
        )

    @property
    def chunks_per_rank(self) -> int:
        """Number of chunks per rank."""
        return 1 if self.degree == 1 else CHUNKS_A_RANK[self.balancer]

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the full sequence."""
        return self.degree * self.chunks_per_rank

    def chunks(self, rank: int, *, lengths: tuple[int, ...] = ()) -> tuple[int, ...]:
        """Return the numbers of a rank's chunks, in ascending order.

        `lengths` are the lengths of the sequence's documents, which `balanced` depends on.
        """
        if self.chunks_per_rank == 1:
            return (rank,)
        if self.balancer == "headtail":
            return (rank, self.num_chunks - 1 - rank)
        return balance_chunks(lengths, degree=self.degree, num_chunks=self.num_chunks)[rank]

    def ranges(self, rank: int, *, lengths: tuple[int, ...]) -> Ranges:
        """Return the parts of a sequence that a rank holds. Adjacent chunks are one stretch."""
        length, remainder = divmod(sum(lengths), self.num_chunks)
        assert not remainder
        ranges: list[tuple[int, int]] = []
        for chunk in self.chunks(rank, lengths=lengths):
            start = chunk * length
            if ranges and ranges[-1][1] == start:
                start, _ = ranges.pop()
            ranges.append((start, (chunk + 1) * length))
        return tuple(ranges)

    def positions(self, rank: int, *, seq_len: int, documents: Documents | None = None) -> Tensor:
        """Return the positions of a rank's tokens in the full sequence, int64 (S).

        If the layout depends on the documents of each sequence, the shape is (B, S).
        """
        per_document = documents is not None and self.balancer == "balanced"
        rows = documents.lengths if documents is not None and per_document else ((seq_len,),)
        held = [
            torch.cat([torch.arange(*stretch) for stretch in self.ranges(rank, lengths=lengths)])
            for lengths in rows
        ]
        return torch.stack(held) if per_document else held[0]

    def order(self) -> list[int]:
        """Return the index of chunk 0, 1 ... in the concatenation of all ranks' chunks."""
        assert self.balancer != "balanced", "the order differs between sequences"
        held = [chunk for rank in range(self.degree) for chunk in self.chunks(rank)]
        return [held.index(chunk) for chunk in range(self.num_chunks)]

    def blocks(
        self, rank: int, *, source: int, seq_len: int, documents: Documents | None = None
    ) -> list[Block]:
        """Return the blocks of the queries of `rank` and the keys of `source`.

        Without documents each block covers all sequences of the batch.
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
        if self.window is not None and self.window < max(lengths):
            return list(self._window_blocks(self.window, lengths, rank, source, samples))
        own = self.ranges(rank, lengths=lengths)
        keys = self.ranges(source, lengths=lengths)
        blocks: list[Block] = []
        end = 0
        for document, start, stop in _parts(own, lengths=lengths):
            first, end = end, end + stop - start
            if source == rank:
                # together with this rank's earlier part of the document, one causal block
                first = _num_before(document, keys)
                cols = slice(first, end)
                extends = bool(blocks) and blocks[-1].rows.start == first
            else:
                if document == start:
                    continue  # the document has no earlier tokens
                cols = slice(_num_before(document, keys), _num_before(start, keys))
                # consecutive parts that attend to the same keys share one kernel
                extends = bool(blocks) and blocks[-1].cols == cols
                first = blocks[-1].rows.start if extends else first
            if extends:
                blocks.pop()
            if cols.start < cols.stop:
                blocks.append(Block(samples, slice(first, end), cols, source == rank))
        return blocks

    def _window_blocks(
        self, window: int, lengths: tuple[int, ...], rank: int, source: int, samples: slice
    ) -> Iterator[Block]:
        """Yield the blocks of one sequence. Each query sees a key, and each key is seen."""
        own, held = (self.ranges(number, lengths=lengths) for number in (rank, source))
        size = window_block(window)
        for document, begin, end in _parts(own, lengths=lengths):
            for start in range(begin, end, size):
                stop = min(start + size, end)
                seen_by_all = (stop - window, start) if stop - start <= window else ()
                cuts = start - window + 1, *seen_by_all, stop
                for (first, last), (low, high) in product(pairwise(cuts), held):
                    low, high = max(low, first, document), min(high, last)
                    if low < high:
                        q_low, q_high = max(start, low), min(stop, high + window - 1)
                        rows = slice(_num_before(q_low, own), _num_before(q_high, own))
                        cols = slice(_num_before(low, held), _num_before(high, held))
                        causal = (q_low, q_high) == (low, high) and high <= low + window
                        band = q_low - low - window + 1, q_low - low
                        has_mask = q_high > low + window or (high > q_low + 1 and not causal)
                        yield Block(samples, rows, cols, causal, band if has_mask else None)


def find_blocks(
    layout: SequenceLayout, rank: int, source: int, seq_len: int, documents: Documents | None
) -> list[Block]:
    """Return `layout.blocks(...)`, cached."""
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
    """Yield each part of a document within a range: start of the document, start, stop."""
    documents = pairwise(accumulate(lengths, initial=0))
    document, end = next(documents)
    for start, stop in ranges:
        while start < stop:
            while end <= start:
                document, end = next(documents)
            yield document, start, min(end, stop)
            start = min(end, stop)


def _num_before(position: int, ranges: Ranges) -> int:
    """Count the tokens in ranges before a position of the sequence."""
    return sum(min(stop, position) - start for start, stop in ranges if start < position)


EVEN_ENOUGH = 1000
"""Chunks are not swapped if the busiest rank is above the mean by less than 1 / EVEN_ENOUGH."""


def chunk_costs(lengths: Sequence[int], *, num_chunks: int) -> list[int]:
    """Return the number of query-key pairs of each chunk of a sequence."""
    seq_len = sum(lengths)
    assert seq_len % num_chunks == 0
    cuts = range(0, seq_len + 1, seq_len // num_chunks)
    ends = list(accumulate(lengths, initial=0))
    pairs_until: list[int] = []
    finished, document = 0, 0  # the pairs of all documents before this one
    for cut in cuts:
        while document < len(lengths) and ends[document + 1] <= cut:
            finished += _pairs(lengths[document])
            document += 1
        pairs_until.append(finished + _pairs(cut - ends[document]))
    return [after - before for before, after in pairwise(pairs_until)]


def _pairs(num_tokens: int) -> int:
    return num_tokens * (num_tokens + 1) // 2


@lru_cache(maxsize=1024)
def balance_chunks(
    lengths: tuple[int, ...], *, degree: int, num_chunks: int
) -> tuple[tuple[int, ...], ...]:
    """Return the chunks of each rank, in ascending order, for documents of these lengths."""
    costs = chunk_costs(lengths, num_chunks=num_chunks)
    room = num_chunks // degree
    assigned: list[list[int]] = [[] for _ in range(degree)]
    sums = [0] * degree
    for chunk in sorted(range(num_chunks), key=lambda chunk: -costs[chunk]):
        rank = min((r for r in range(degree) if len(assigned[r]) < room), key=lambda r: sums[r])
        assigned[rank].append(chunk)
        sums[rank] += costs[chunk]
    while _swap_chunks(assigned, sums, costs):
        pass
    return tuple(tuple(sorted(chunks)) for chunks in assigned)


def _swap_chunks(assigned: list[list[int]], sums: list[int], costs: Sequence[int]) -> bool:
    """Swap one chunk of the busiest rank, with the pair that brings it closest to another rank.

    Returns whether any pair was found.
    """
    busiest = max(range(len(assigned)), key=lambda rank: sums[rank])
    if (sums[busiest] * len(sums) - sum(sums)) * EVEN_ENOUGH <= sum(sums):
        return False
    best: tuple[int, int, int, int] | None = None
    for rank in sorted(range(len(assigned)), key=lambda rank: sums[rank]):
        gap = sums[busiest] - sums[rank]
        for i, moved in enumerate(assigned[busiest]):
            for j, taken in enumerate(assigned[rank]):
                less = costs[moved] - costs[taken]
                # both sums stay below the sum of the busiest rank, so the loop ends
                if 0 < less < gap and (best is None or abs(gap - 2 * less) < best[0]):
                    best = abs(gap - 2 * less), rank, i, j
    if best is None:
        return False
    _, rank, i, j = best
    moved, taken = assigned[busiest][i], assigned[rank][j]
    assigned[busiest][i], assigned[rank][j] = taken, moved
    sums[busiest] -= costs[moved] - costs[taken]
    sums[rank] += costs[moved] - costs[taken]
    return True
