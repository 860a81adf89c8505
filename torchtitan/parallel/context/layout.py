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
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Literal

import torch
from torch import Tensor

from torchtitan.mesh.settings import CHUNKS_A_RANK, Balancer
from torchtitan.models.documents import Documents
from torchtitan.parallel.batch import Batch
from torchtitan.parallel.context.balance import deal

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
    return documents.remember(
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
        document_attention: Literal["across", "within"] = "across",
        document_positions: Literal["continue", "restart"] = "continue",
    ) -> None:
        self._layout, self._rank = layout, rank
        self._separates = document_attention == "within"
        self._restarts = document_positions == "restart"

    def take(self, samples: Mapping[str, Tensor]) -> Batch:
        """Return the rank's part of whole sequences: `tokens` and `labels`, int64 (B, S).

        Where documents matter there are `document_lengths` too, those of all sequences in a row,
        and where samples are filled up `is_padding`, bool (B, S).
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
        is_padding = samples.get("is_padding")
        return Batch(
            is_padding=None if is_padding is None else _pick(is_padding, places),
            tokens=_pick(tokens_BS, places),
            labels=_pick(labels_BS, places),
            positions=positions,
            documents=separated,
        )


def _pick(x_BS: Tensor, places: Tensor) -> Tensor:
    """Take the tokens at the same places of each sequence, or at those of its own."""
    if places.shape[-1] == x_BS.shape[1]:
        return x_BS  # all of it, in its order, in page-locked memory if it is there
    return x_BS.index_select(1, places) if places.ndim == 1 else x_BS.gather(1, places)
