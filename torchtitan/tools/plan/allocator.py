"""A model of torch's caching allocator: the memory that it takes from the device.

A GPU runs out of *reserved* memory, which is more than the sum of live storages: sizes are rounded
up, each stream has its own memory, and free blocks may be too small for the next request. The rules
are those of c10/cuda/CUDACachingAllocator.cpp (torch 2.13):

- A size is rounded up to 512 bytes. Sizes up to 1 MiB come from segments of 2 MiB.
- The smallest free block of the stream that is large enough is used, the first of several. The rest
  of the block stays free if it is more than 1 MiB or if the segment is for small blocks.
- If no block is large enough, a segment is taken from the device: 20 MiB for sizes below 10 MiB,
  otherwise the size, rounded up to 2 MiB.
- Free neighbours within a segment are merged.

With `PYTORCH_ALLOC_CONF=expandable_segments:True` a stream has two segments that grow at their
end, in pages of 2 MiB or 20 MiB, and the rest of a block always stays free. The last block has the
largest possible size, so it is used only if no other block fits.

Segments are never returned. If the device is full, torch frees empty segments and tries again. That
delays an out-of-memory error and costs time, so a plan does not rely on it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

MIB, GIB = 1 << 20, 1 << 30
ROUNDING = 512
SMALL = MIB
"""Largest size of a small block, and largest rest of a large block that is not split off."""
SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT = 2 * MIB, 20 * MIB, 10 * MIB
_APART = 1 << 50
"""Distance between segments, so that their blocks are never neighbours."""

Block = tuple[int, int]
"""Address and size."""


class Allocator:
    """The reserved memory of one device, by stream."""

    def __init__(self, *, expandable: bool) -> None:
        self._expandable = expandable
        self._pools: dict[tuple[str, bool], _Pool] = {}
        self.active = 0
        """Bytes of blocks in use."""

    @property
    def reserved(self) -> int:
        """Bytes taken from the device."""
        return sum(pool.reserved for pool in self._pools.values())

    def take(self, size: int, *, stream: str) -> tuple[str, bool, Block]:
        """Allocate `size` bytes, more than 0, and return the place for `give`."""
        size = -(-size // ROUNDING) * ROUNDING
        key = stream, size <= SMALL
        if key not in self._pools:
            self._pools[key] = _Pool(is_small=key[1], expandable=self._expandable)
        block = self._pools[key].take(size)
        self.active += block[1]
        return *key, block

    def give(self, place: tuple[str, bool, Block]) -> None:
        """Free a place that `take` returned."""
        stream, is_small, block = place
        self.active -= block[1]
        self._pools[stream, is_small].give(block)


class _Pool:
    """The segments of one stream, for small or for large blocks."""

    def __init__(self, *, is_small: bool, expandable: bool) -> None:
        self.reserved = 0
        self._is_small, self._expandable = is_small, expandable
        self._least_rest = ROUNDING if is_small or expandable else SMALL + 1
        self._num_segments = 0
        self._free: list[Block] = []
        """Size and address of free blocks, sorted."""
        self._starts: dict[int, int] = {}
        """Size of each free block, by its address."""
        self._ends: dict[int, int] = {}
        """Size of each free block, by the address of its end."""

    def take(self, size: int) -> Block:
        index = bisect_left(self._free, (size, 0))
        if index == len(self._free):
            self._grow(size)
            index = bisect_left(self._free, (size, 0))
        found, address = self._free[index]
        is_end = address + found == self.reserved
        if self._expandable and is_end and index + 1 < len(self._free):
            found, address = self._free[index + 1]
        self._remove(address)
        if found - size >= self._least_rest:
            self._add(address + size, found - size)
            found = size
        return address, found

    def give(self, block: Block) -> None:
        address, size = block
        if address in self._ends:  # merge with the free neighbours
            size += self._ends[address]
            address -= self._ends[address]
            self._remove(address)
        if address + size in self._starts:
            behind = address + size
            size += self._starts[behind]
            self._remove(behind)
        self._add(address, size)

    def _grow(self, size: int) -> None:
        if self._expandable:
            page = SMALL_SEGMENT if self._is_small else LARGE_SEGMENT
            end = self.reserved
            missing = size - self._ends.get(end, 0)
            taken = -(-missing // page) * page
            self.reserved += taken
            self.give((end, taken))
            return
        if self._is_small:
            taken = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            taken = LARGE_SEGMENT
        else:
            taken = -(-size // SMALL_SEGMENT) * SMALL_SEGMENT
        self.reserved += taken
        self._num_segments += 1
        self._add(self._num_segments * _APART, taken)

    def _add(self, address: int, size: int) -> None:
        insort(self._free, (size, address))
        self._starts[address] = size
        self._ends[address + size] = size

    def _remove(self, address: int) -> None:
        size = self._starts.pop(address)
        del self._ends[address + size]
        del self._free[bisect_left(self._free, (size, address))]
