"""Row order of wq and wk: interleaved (torchtitan, Meta) or half-split (Hugging Face).

Rotary embeddings rotate pairs of channels of a head. Here, as in Meta's weights, a pair is
(2i, 2i + 1); Hugging Face pairs i with i + D/2. So row 2i + p of a head is their row p D/2 + i.
Of heads whose first R channels are rotated, only those are in another order, with R for D. Names
and shapes are the same: read in the wrong order, a model loads without an error and generates
nonsense.

A rank reads only the rows of its shard, which may start or end within a head. So the order is
described as runs: contiguous rows in the file, and their places in the shard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

Heads = tuple[int, int]
"""Width of a head, and the number of its first channels that are rotated."""
HeadsOf = Callable[[str], Heads | None]
"""Heads of a parameter in half-split order; None for interleaved order."""
Copy = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Destination and source region of a copy."""


def runs(start: int, count: int, *, heads: Heads | None) -> Iterator[tuple[slice, slice]]:
    """Yield runs of rows in the file and their places among our rows [start, start + count)."""
    if heads is None:
        yield slice(start, start + count), slice(0, count)
        return
    width, rotated = heads
    for head in range(start // width, -(-(start + count) // width)):
        row = head * width
        first, last = max(start - row, 0), min(start + count - row, width)
        for p in (0, 1):
            # the pairs i with first <= 2i + p < last
            begin, end = ((min(at, rotated) - p + 1) // 2 for at in (first, last))
            if begin < end:
                target = row + 2 * begin + p - start
                theirs = slice(row + p * rotated // 2 + begin, row + p * rotated // 2 + end)
                yield theirs, slice(target, target + 2 * (end - begin) - 1, 2)
        if last > rotated:
            kept = row + max(first, rotated)
            yield slice(kept, row + last), slice(kept - start, row + last - start)


def overlap(
    start: Sequence[int],
    lengths: Sequence[int],
    *,
    offsets: Sequence[int],
    sizes: Sequence[int],
    heads: Heads | None,
) -> Iterator[Copy]:
    """Yield the copies from a stored piece to a region of our tensor.

    The region has shape `lengths` at `start`, the piece has shape `sizes` at `offsets`.
    """
    if not start:  # a scalar
        yield (), ()
        return
    columns: list[tuple[slice, slice]] = []
    for ours, width, theirs, extent in zip(
        start[1:], lengths[1:], offsets[1:], sizes[1:], strict=True
    ):
        first, last = max(ours, theirs), min(ours + width, theirs + extent)
        if first >= last:
            return
        columns.append((slice(first - ours, last - ours), slice(first - theirs, last - theirs)))
    into, out_of = tuple(a for a, _ in columns), tuple(b for _, b in columns)
    for rows, target in runs(start[0], lengths[0], heads=heads):
        first, last = max(rows.start, offsets[0]), min(rows.stop, offsets[0] + sizes[0])
        if first < last:
            step = target.step or 1
            begin = target.start + step * (first - rows.start)
            ours_rows = slice(begin, begin + step * (last - first - 1) + 1, step)
            yield (ours_rows, *into), (slice(first - offsets[0], last - offsets[0]), *out_of)


def to_their_rows(weight: Tensor, *, heads: Heads | None) -> Tensor:
    """Permute the rows of a parameter from interleaved to half-split order."""
    if heads is None:
        return weight
    width, rotated = heads
    order = [*range(0, rotated, 2), *range(1, rotated, 2), *range(rotated, width)]
    return weight.unflatten(0, (-1, width))[:, order].flatten(0, 1)
