"""The caching allocator: cases worked out on paper, and another implementation of its rules."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import pytest

from torchtitan.tools.plan.allocator import Allocator

KIB, MIB = 1 << 10, 1 << 20


def reserved(*sizes: int, expandable: bool = False) -> int:
    """Return what is taken from the device for blocks that all live, of one stream."""
    allocator = Allocator(expandable=expandable)
    for size in sizes:
        allocator.take(size, stream="compute")
    return allocator.reserved


@pytest.mark.parametrize(("size", "rounded"), [(1, 512), (512, 512), (513, 1024), (3000, 3072)])
def test_sizes_are_rounded_up(size: int, rounded: int) -> None:
    allocator = Allocator(expandable=False)
    place = allocator.take(size, stream="compute")
    assert allocator.active == rounded
    allocator.give(place)
    assert allocator.active == 0


@pytest.mark.parametrize(
    ("sizes", "segments"),
    [
        ([512], 2 * MIB),
        ([MIB], 2 * MIB),
        ([MIB, MIB], 2 * MIB),  # both in one
        ([MIB, MIB, 1], 4 * MIB),
        ([MIB + 1], 20 * MIB),
        ([10 * MIB - 512], 20 * MIB),
        ([10 * MIB], 10 * MIB),  # a segment of its own
        ([10 * MIB + 1], 12 * MIB),
        ([33 * MIB], 34 * MIB),
        ([5 * MIB] * 4, 20 * MIB),
        ([5 * MIB] * 5, 40 * MIB),
        ([6 * MIB] * 4, 40 * MIB),  # three in the first
        ([MIB, 2 * MIB], 22 * MIB),  # small ones apart from large ones
    ],
)
def test_segments(sizes: list[int], segments: int) -> None:
    assert reserved(*sizes) == segments


def test_what_is_left_of_a_large_block_is_split_off_only_above_a_mebibyte() -> None:
    allocator = Allocator(expandable=False)
    # of 20 MiB 19 are taken: the last one is no block of its own
    allocator.give(allocator.take(12 * MIB, stream="compute"))  # a segment of 12 MiB, free
    allocator.take(11 * MIB, stream="compute")
    assert allocator.active == 12 * MIB
    allocator.take(12 * MIB, stream="compute")  # another segment of 12 MiB
    assert allocator.reserved == 24 * MIB
    # of 12 MiB 10.5: 1.5 MiB are left, and used
    allocator = Allocator(expandable=False)
    allocator.give(allocator.take(12 * MIB, stream="compute"))
    allocator.take(10 * MIB + MIB // 2, stream="compute")
    assert allocator.active == 10 * MIB + MIB // 2
    allocator.take(MIB + MIB // 2, stream="compute")
    assert (allocator.active, allocator.reserved) == (12 * MIB, 12 * MIB)


def test_the_smallest_block_that_fits_is_taken() -> None:
    allocator = Allocator(expandable=False)
    big = allocator.take(30 * MIB, stream="compute")
    middle = allocator.take(16 * MIB, stream="compute")
    small = allocator.take(12 * MIB, stream="compute")
    for place in (big, small, middle):
        allocator.give(place)
    assert allocator.take(14 * MIB, stream="compute")[2][0] == middle[2][0]
    assert allocator.take(12 * MIB, stream="compute")[2] == small[2]
    assert allocator.take(12 * MIB, stream="compute")[2][0] == big[2][0]
    assert allocator.reserved == 58 * MIB


def test_holes_are_too_small_and_neighbours_are_one_again() -> None:
    allocator = Allocator(expandable=False)
    places = [allocator.take(4 * MIB, stream="compute") for _ in range(5)]  # 20 MiB, full
    allocator.give(places[0])
    allocator.give(places[2])
    allocator.take(6 * MIB, stream="compute")  # 8 MiB are free, in two holes
    assert allocator.reserved == 40 * MIB
    allocator.give(places[1])  # the holes are one of 12 MiB
    assert allocator.take(12 * MIB, stream="compute")[2] == (places[0][2][0], 12 * MIB)
    assert allocator.reserved == 40 * MIB


def test_segments_are_no_neighbours() -> None:
    allocator = Allocator(expandable=False)
    for place in [allocator.take(10 * MIB, stream="compute") for _ in range(2)]:
        allocator.give(place)
    allocator.take(20 * MIB, stream="compute")
    assert allocator.reserved == 40 * MIB


def test_no_stream_has_the_memory_of_another() -> None:
    allocator = Allocator(expandable=False)
    for stream in ("compute", "gather", "compute"):
        allocator.give(allocator.take(12 * MIB, stream=stream))
    assert allocator.reserved == 24 * MIB


def test_expandable_segments_grow_at_their_end() -> None:
    assert reserved(MIB, MIB, 512, expandable=True) == 4 * MIB
    assert reserved(21 * MIB, expandable=True) == 40 * MIB
    allocator = Allocator(expandable=True)
    first = allocator.take(15 * MIB, stream="compute")
    last = allocator.take(15 * MIB, stream="compute")  # 5 MiB are left of 20, 10 are missing
    assert allocator.reserved == 40 * MIB
    assert last[2][0] == first[2][0] + 15 * MIB
    allocator.give(first)
    allocator.give(last)
    allocator.take(40 * MIB, stream="compute")  # all is one block
    assert allocator.reserved == 40 * MIB
    allocator.take(20 * MIB - 512, stream="compute")
    allocator.take(512, stream="compute")  # of the small ones
    assert allocator.reserved == 62 * MIB


def test_whatever_is_left_of_an_expandable_segment_can_be_taken() -> None:
    allocator = Allocator(expandable=True)
    allocator.take(19 * MIB, stream="compute")
    assert allocator.active == 19 * MIB
    allocator.take(20 * MIB + MIB, stream="compute")  # 1 MiB is there, 20 are missing
    assert allocator.reserved == 40 * MIB


def test_the_end_of_an_expandable_segment_is_taken_last() -> None:
    allocator = Allocator(expandable=True)
    first = allocator.take(15 * MIB, stream="compute")
    allocator.take(21 * MIB, stream="compute")  # 4 MiB are left at the end of 40
    allocator.give(first)
    # in the hole of 15 MiB, though the end fits better
    assert allocator.take(3 * MIB, stream="compute")[2] == (first[2][0], 3 * MIB)
    allocator.take(12 * MIB, stream="compute")  # the rest of the hole
    assert allocator.take(3 * MIB, stream="compute")[2] == (36 * MIB, 3 * MIB)
    assert allocator.reserved == 40 * MIB


@dataclass
class Part:
    """A stretch of a segment in the other implementation."""

    size: int
    is_free: bool = True


class Naive:
    """The same rules: each segment is a list of its parts in order, searched from end to end."""

    def __init__(self, *, expandable: bool) -> None:
        self.expandable = expandable
        self.segments: dict[tuple[str, str], list[list[Part]]] = {}

    def take(self, size: int, *, stream: str) -> Part:
        while size % 512:
            size += 1
        pool = "small" if size <= 1048576 else "large"
        segments = self.segments.setdefault((stream, pool), [])
        if self.expandable and not segments:
            segments.append([])
        if self._best(segments, size) is None:
            self._more(segments, size, pool)
        # growing counts: the end of a segment is larger than any other part
        found = self._best(segments, size)
        if self.expandable:
            inner = self._best([segment[:-1] for segment in segments], size)
            found = found if inner is None else (segments[0], inner[1])
        assert found is not None
        segment, part = found
        left = part.size - size
        may_split = left > 1048576 if pool == "large" and not self.expandable else left >= 512
        if may_split:
            part.size = size
            segment.insert(_place(segment, part) + 1, Part(left))
        part.is_free = False
        return part

    def give(self, part: Part) -> None:
        part.is_free = True
        for segments in self.segments.values():
            for segment in segments:
                merged: list[Part] = []
                for each in segment:
                    if merged and merged[-1].is_free and each.is_free:
                        merged[-1].size += each.size
                    else:
                        merged.append(each)
                segment[:] = merged

    def _more(self, segments: list[list[Part]], size: int, pool: str) -> None:
        if self.expandable:
            [segment] = segments
            page = 2097152 if pool == "small" else 20971520
            if not (segment and segment[-1].is_free):
                segment.append(Part(0))
            while segment[-1].size < size:
                segment[-1].size += page
        elif pool == "small":
            segments.append([Part(2097152)])
        elif size < 10485760:
            segments.append([Part(20971520)])
        else:
            segments.append([Part(2097152 * ((size + 2097151) // 2097152))])

    @staticmethod
    def _best(segments: list[list[Part]], size: int) -> tuple[list[Part], Part] | None:
        fitting = [(s, p) for s in segments for p in s if p.is_free and p.size >= size]
        return min(fitting, key=lambda pair: pair[1].size, default=None)  # the first of equal ones

    def parts(self) -> Iterator[Part]:
        for segments in self.segments.values():
            for segment in segments:
                yield from segment


def _place(segment: list[Part], part: Part) -> int:
    return next(i for i, each in enumerate(segment) if each is part)


@pytest.mark.parametrize("expandable", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_another_implementation_agrees(seed: int, expandable: bool) -> None:
    draw = random.Random(seed)
    ours, other = Allocator(expandable=expandable), Naive(expandable=expandable)
    live: list[tuple[tuple[str, bool, tuple[int, int]], Part]] = []
    for _ in range(600):
        if live and draw.random() < 0.48:
            place, part = live.pop(draw.randrange(len(live)))
            ours.give(place)
            other.give(part)
        else:
            size = int(2 ** draw.uniform(0, 26))
            stream = draw.choice(["compute", "compute", "gather"])
            live.append((ours.take(size, stream=stream), other.take(size, stream=stream)))
        assert ours.reserved == sum(part.size for part in other.parts())
        assert ours.active == sum(part.size for part in other.parts() if not part.is_free)
        assert ours.active <= ours.reserved
        assert [place[2][1] for place, _ in live] == [part.size for _, part in live]
        _check_apart([place for place, _ in live])


def _check_apart(places: list[tuple[str, bool, tuple[int, int]]]) -> None:
    """Check that no two blocks of a pool overlap."""
    taken = sorted((*place[:2], *place[2]) for place in places)
    for (*pool, start, size), (*next_pool, next_start, _) in pairwise(taken):
        assert pool != next_pool or start + size <= next_start
