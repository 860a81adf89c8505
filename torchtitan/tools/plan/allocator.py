"""A model of torch's caching allocator: the memory that it takes from the device.

A GPU runs out of *reserved* memory, which is more than the sum of live storages: sizes are rounded
up, each stream has its own memory, and free blocks may be too small for the next request. The rules
are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13) with
`PYTORCH_ALLOC_CONF=expandable_segments:True`, which the trainer's command sets:

- A size is rounded up to 512 bytes.
- A stream has two segments, one for sizes up to 1 MiB, that grow at their end, in pages of 2 MiB or
  20 MiB.
- The smallest free block that is large enough is used, the first of several. The rest of it stays
  free. The last block has the largest possible size, so it is used only if no other block fits.
- Free neighbours are merged.

Segments are never returned. If the device is full, torch frees empty segments and tries again. That
delays an out-of-memory error and costs time, so a plan does not rely on it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB, GIB = 1 << 20, 1 << 30
ROUNDING = 512
SMALL = MIB
"""Largest size of a small block."""
SMALL_PAGE, LARGE_PAGE = 2 * MIB, 20 * MIB

Block = tuple[int, int]
"""Address and size."""


class Allocator:
    """The reserved memory of one device, by stream."""

    def __init__(self) -> None:
        self._segments: dict[tuple[str, bool], _Segment] = {}
        self.active = 0
        """Bytes of blocks in use."""

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return sum(segment.end for segment in self._segments.values())

    def take(self, size: int, *, stream: str) -> tuple[str, bool, Block]:
        """Allocate `size` bytes, more than 0, and return the place for `give`."""
        size = -(-size // ROUNDING) * ROUNDING
        key = stream, size <= SMALL
        if key not in self._segments:
            self._segments[key] = _Segment(page=SMALL_PAGE if size <= SMALL else LARGE_PAGE)
        self.active += size
        return *key, (self._segments[key].take(size), size)

    def give(self, position: tuple[str, bool, Block]) -> None:
        """Free a place that `take` returned."""
        stream, is_small, (address, size) = position
        self.active -= size
        self._segments[stream, is_small].give(address, size)


class _Segment:
    """The memory of one stream, for small or for large blocks."""

    def __init__(self, *, page: int) -> None:
        self.end = 0
        self._page = page
        self._free: list[Block] = []
        """Size and address of free blocks, sorted."""
        self._starts: dict[int, int] = {}
        """Size of each free block, by its address."""
        self._ends: dict[int, int] = {}
        """Size of each free block, by the address of its end."""

    def take(self, size: int) -> int:
        """Return the address of a block."""
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            start, missing = self.end, size - self._ends.get(self.end, 0)
            self.end += -(-missing // self._page) * self._page
            self.give(start, self.end - start)
            index = bisect_left(self._free, (size, 0))
        block, address = self._free[index]
        if address + block == self.end and index + 1 < len(self._free):
            block, address = self._free[index + 1]
        self._remove(address)
        if block > size:
            self._add(address + size, block - size)
        return address

    def give(self, address: int, size: int) -> None:
        """Free a block, and merge it with its free neighbours."""
        if address in self._ends:
            size += self._ends[address]
            address -= self._ends[address]
            self._remove(address)
        if address + size in self._starts:
            behind = address + size
            size += self._starts[behind]
            self._remove(behind)
        self._add(address, size)

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._starts[address] = size
        self._ends[address + size] = size

    def _remove(self, address: int) -> None:
        size = self._starts.pop(address)
        del self._ends[address + size]
        del self._free[bisect_left(self._free, (size, address))]
