"""Examples of different lengths put together into samples of equal length.

One example per sample would fill most of a batch with padding. Cutting examples to fill samples, as
with text, would separate answers from their questions. So whole examples are packed by best fit
decreasing: from the longest to the shortest, each into the sample where it leaves the least room.
This takes at most 11/9 of the fewest samples possible, plus a constant (Johnson, "Near-optimal bin
packing algorithms", 1973). Data for fine-tuning have many short examples, so little stays empty.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence


def best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return groups of places in `lengths`, each of at most `capacity` together.

    Each place comes once. Equal lengths keep their order, so the groups depend only on the lengths.
    """
    assert all(0 < length <= capacity for length in lengths)
    groups: list[list[int]] = []
    # what is left in each group, and its number, sorted
    room: list[tuple[int, int]] = []
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        length = lengths[place]
        best = bisect_left(room, (length, 0))
        if best == len(room):
            left, group = capacity, len(groups)
            groups.append([])
        else:
            left, group = room.pop(best)
        groups[group].append(place)
        if left > length:
            insort(room, (left - length, group))
    return groups


def pack(lengths: Sequence[int], *, capacity: int, window: int) -> Iterator[list[int]]:
    """Yield the groups of the first `window` lengths, then those of the next, and so on.

    Examples stay near their neighbours, and a search is over at most a window.
    """
    for first in range(0, len(lengths), window):
        for group in best_fit(lengths[first : first + window], capacity=capacity):
            yield [first + place for place in group]
