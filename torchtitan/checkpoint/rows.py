"""The order of rows in wq and wk: ours, and that of files in which a head lies in halves.

The rotation turns pairs of channels of a head. Here, as in Meta's weights, a pair is two neighbours
(2i, 2i + 1); Hugging Face and some others pair i with i + D/2. So row 2i + p of a head is their row
p D/2 + i. Names and shapes are the same: read in the wrong order, a model loads without an error
and writes nonsense.

A rank reads only the rows of its shard, and a shard may begin or end within a head. So the order is
described as runs: rows that are contiguous in the file, and where they belong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

HeadDim = Callable[[str], int | None]
"""From a parameter's name to the width of the heads whose rows lie in halves; None: they lie as
ours."""
Places = tuple[tuple[slice, ...], tuple[slice, ...]]
"""Where something goes, and where it comes from."""


def runs(start: int, count: int, *, head_dim: int | None) -> Iterator[tuple[slice, slice]]:
    """Yield which of their rows make `count` of ours from `start` on: the rows in the file, and
    their places among these `count`."""
    if head_dim is None:
        yield slice(start, start + count), slice(0, count)
        return
    half = head_dim // 2
    for head in range(start // head_dim, -(-(start + count) // head_dim)):
        row = head * head_dim
        first, last = max(start - row, 0), min(start + count - row, head_dim)
        for p in (0, 1):
            # the pairs i with first <= 2i + p < last
            begin, end = (first - p + 1) // 2, (last - p + 1) // 2
            if begin < end:
                place = row + 2 * begin + p - start
                theirs = slice(row + p * half + begin, row + p * half + end)
                yield theirs, slice(place, place + 2 * (end - begin) - 1, 2)


def overlap(
    start: Sequence[int],
    lengths: Sequence[int],
    *,
    offsets: Sequence[int],
    sizes: Sequence[int],
    head_dim: int | None,
) -> Iterator[Places]:
    """Yield what of a region of our tensor, `lengths` from `start` on, lies in a piece of theirs,
    `sizes` from `offsets` on: the places in the region, and in the piece."""
    columns: list[tuple[slice, slice]] = []
    for ours, width, theirs, there in zip(
        start[1:], lengths[1:], offsets[1:], sizes[1:], strict=True
    ):
        first, last = max(ours, theirs), min(ours + width, theirs + there)
        if first >= last:
            return
        columns.append((slice(first - ours, last - ours), slice(first - theirs, last - theirs)))
    into, out_of = tuple(a for a, _ in columns), tuple(b for _, b in columns)
    for rows, place in runs(start[0], lengths[0], head_dim=head_dim):
        first, last = max(rows.start, offsets[0]), min(rows.stop, offsets[0] + sizes[0])
        if first < last:
            step = place.step or 1
            begin = place.start + step * (first - rows.start)
            ours_rows = slice(begin, begin + step * (last - first - 1) + 1, step)
            yield (ours_rows, *into), (slice(first - offsets[0], last - offsets[0]), *out_of)


def to_their_rows(weight: Tensor, *, head_dim: int | None) -> Tensor:
    """Put all rows of a parameter of ours into their order."""
    if head_dim is None:
        return weight
    return weight.unflatten(0, (-1, head_dim // 2, 2)).transpose(1, 2).flatten(0, 2)
