"""Who holds which part of a sequence, and what each part has to attend to.

The sequence is cut into chunks of equal length. `headtail` gives rank r of n the chunks r and
2n - 1 - r: causal attention costs a chunk in proportion to its place, so a chunk near the head and
one near the tail make the same sum on every rank. Without load balance rank r holds chunk r, and
the last rank works 2n - 1 times as long as the first.

A pair of chunks is attended in full, causally (a chunk with itself) or not at all, so a list of
rectangles says all that a mask would. Nothing here knows of devices or processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from torchtitan.parallel.batch import Batch

Balancer = Literal["headtail", "none"]


@dataclass(frozen=True)
class Block:
    """Queries and keys, by their places on the ranks that hold them, that meet in one kernel."""

    rows: slice
    cols: slice
    causal: bool
    """Each query sees the keys up to its own place in the block; otherwise it sees all."""


@dataclass(frozen=True, kw_only=True)
class SequenceLayout:
    """Sequences of any length, a multiple of `num_chunks`, over `degree` ranks."""

    degree: int
    balancer: Balancer

    @property
    def chunks_a_rank(self) -> int:
        """Number of chunks that a rank holds."""
        return 2 if self.balancer == "headtail" else 1

    @property
    def num_chunks(self) -> int:
        """Number of chunks of the whole sequence."""
        return self.degree * self.chunks_a_rank

    def chunks(self, rank: int) -> tuple[int, ...]:
        """Return the numbers of a rank's chunks, in the order in which it holds them: upwards."""
        return (rank, self.num_chunks - 1 - rank) if self.balancer == "headtail" else (rank,)

    def positions(self, rank: int, *, seq_len: int) -> Tensor:
        """Return the places of a rank's tokens in a sequence, int64."""
        assert seq_len % self.num_chunks == 0
        length = seq_len // self.num_chunks
        return torch.cat([torch.arange(n * length, (n + 1) * length) for n in self.chunks(rank)])

    def order(self) -> list[int]:
        """Return where chunk 0, 1 ... of the sequence stands among all ranks' chunks in a row."""
        held = [chunk for rank in range(self.degree) for chunk in self.chunks(rank)]
        return [held.index(chunk) for chunk in range(self.num_chunks)]

    def blocks(self, rank: int, *, source: int, num_tokens: int) -> list[Block]:
        """Return what the queries of `rank` attend to among the keys of `source`.

        `num_tokens` are those of one rank.
        """
        length, own = num_tokens // self.chunks_a_rank, self.chunks(rank)
        whole = slice(0, num_tokens)
        if source == rank:
            return [Block(whole, whole, True)]  # held upwards, so causal as a whole
        blocks: list[Block] = []
        for place, chunk in enumerate(own):
            seen = sum(other < chunk for other in self.chunks(source)) * length
            start = place * length
            if blocks and blocks[-1].cols.stop == seen:
                start = blocks.pop().rows.start  # neighbours that see the same: one kernel
            if seen:
                blocks.append(Block(slice(start, (place + 1) * length), slice(0, seen), False))
        return blocks


class SequenceShard:
    """The one place where tokens, labels and positions are cut to a rank's part of the sequence."""

    def __init__(self, layout: SequenceLayout, *, rank: int) -> None:
        self._layout, self._rank = layout, rank

    def take(self, samples: Mapping[str, Tensor]) -> Batch:
        """Return the rank's part of whole sequences: `tokens` and `labels`, int64 (B, S)."""
        tokens_BS, labels_BS = samples["tokens"], samples["labels"]
        positions_S = self._layout.positions(self._rank, seq_len=tokens_BS.shape[1])
        return Batch(
            tokens=tokens_BS.index_select(1, positions_S),
            labels=labels_BS.index_select(1, positions_S),
            positions=positions_S,
        )
