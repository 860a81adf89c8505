"""The caching allocator: cases worked out on paper, and another implementation of its rules."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest

from torchtitan.tools.plan.allocator import Allocator

MIB = 1 << 20


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ([512], 2),
        ([MIB, MIB], 2),  # both in one page
        ([MIB, MIB, 512], 4),
        ([MIB + 1], 20),
        ([21 * MIB], 40),
        ([19 * MIB, 21 * MIB], 40),  # 1 MiB is there, 20 are missing
        ([5 * MIB] * 5, 40),
        ([MIB, 2 * MIB], 22),  # small ones apart from large ones
    ],
)
def test_segments_grow_in_pages(sizes: list[int], expected: int) -> None:
    allocator = Allocator()
    for size in sizes:
        allocator.take(size, stream="compute")
    assert allocator.reserved == expected * MIB


@dataclass(eq=False)
class Part:
    """A stretch of a segment in the other implementation."""

    size: int
    is_free: bool = True


class Naive:
    """The same rules: a segment is a list of its parts in order, searched from end to end."""

    def __init__(self) -> None:
        self.segments: dict[tuple[str, bool], list[Part]] = {}

    def take(self, size: int, *, stream: str) -> Part:
        while size % 512:
            size += 1
        is_small = size <= 1048576
        segment = self.segments.setdefault((stream, is_small), [])
        if not any(part.is_free and part.size >= size for part in segment):
            if not (segment and segment[-1].is_free):
                segment.append(Part(0))
            while segment[-1].size < size:
                segment[-1].size += 2097152 if is_small else 20971520
        inner = [part for part in segment[:-1] if part.is_free and part.size >= size]
        found = min(inner, key=lambda part: part.size, default=segment[-1])  # the first of equals
        if found.size > size:
            segment.insert(segment.index(found) + 1, Part(found.size - size))
            found.size = size
        found.is_free = False
        return found

    def give(self, part: Part) -> None:
        part.is_free = True
        for segment in self.segments.values():
            merged: list[Part] = []
            for each in segment:
                if merged and merged[-1].is_free and each.is_free:
                    merged[-1].size += each.size
                else:
                    merged.append(each)
            segment[:] = merged

    def parts(self) -> list[Part]:
        return [part for segment in self.segments.values() for part in segment]


@pytest.mark.promise("plan-formulas")
@pytest.mark.parametrize("seed", range(8))
def test_another_implementation_agrees(seed: int) -> None:
    draw = random.Random(seed)
    ours, other = Allocator(), Naive()
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
        assert [place[2][1] for place, _ in live] == [part.size for _, part in live]
        taken = sorted((*place[:2], *place[2]) for place, _ in live)
        for (*pool, start, size), (*next_pool, next_start, _) in pairwise(taken):
            assert pool != next_pool or start + size <= next_start, "blocks overlap"
