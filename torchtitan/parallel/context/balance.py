"""Chunks of a sequence dealt out to ranks, so that attention costs each the same.

A token attends to those of its document up to itself: its place there, counted from 1, is what it
costs. With documents of mixed lengths no fixed pattern is even, so the chunks of each sequence are
dealt out by what they cost. Each rank gets the same number of chunks, since memory must be even
too. The costliest go first, each to the rank with least so far that has room (Graham's rule of
longest processing time); then pairs are exchanged while that brings two ranks closer together.
It is a pure function of the lengths: every rank computes the same and nothing is sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

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
