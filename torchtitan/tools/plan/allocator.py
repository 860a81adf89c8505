"""What torch's caching allocator makes of a tape: the memory it takes from the device.

A GPU runs out of *reserved* memory, which is more than the sum of what lives: sizes are rounded up,
each stream has memory of its own, and holes are too small for what comes next. The rules are those
of c10/cuda/CUDACachingAllocator.cpp (torch 2.13):

- a size is rounded up to 512 bytes; up to 1 MiB is taken from segments of 2 MiB, more from others
- of the free blocks of its stream that are large enough the smallest is taken, of several the
  first; what is left over stays free, if it is more than 1 MiB or the segment is of small blocks
- where none is large enough a segment is taken from the device: 20 MiB for sizes below 10 MiB, else
  the size, rounded up to 2 MiB
- neighbours of a segment that are free are one block again

With `PYTORCH_ALLOC_CONF=expandable_segments:True` a stream has two segments that grow at their
end, in pages of 2 MiB or 20 MiB, and what is left over always stays free. The block at the end is
as large as it can grow, so it is taken where no other fits.

Segments are never given back: what the allocator does when the device is full, to free those that
are empty and try again, delays an out-of-memory error and costs time; a plan should not rely on it.
"""

from __future__ import annotations

from bisect import bisect_left, insort

KIB, MIB = 1 << 10, 1 << 20
ROUNDING = 512
SMALL = MIB
"""The largest size of a small block, and what may be left of a large one."""
SMALL_SEGMENT, LARGE_SEGMENT, OWN_SEGMENT = 2 * MIB, 20 * MIB, 10 * MIB
_APART = 1 << 50
"""Distance of segments, so that blocks of two are no neighbours."""

Block = tuple[int, int]
"""Address and size."""


class Allocator:
    """The reserved memory of one device, by streams."""

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
        """Return where `size` bytes, more than 0, are put; `give` takes it."""
        size = -(-size // ROUNDING) * ROUNDING
        key = stream, size <= SMALL
        if key not in self._pools:
            self._pools[key] = _Pool(is_small=key[1], expandable=self._expandable)
        block = self._pools[key].take(size)
        self.active += block[1]
        return *key, block

    def give(self, place: tuple[str, bool, Block]) -> None:
        """Free what `take` returned."""
        stream, is_small, block = place
        self.active -= block[1]
        self._pools[stream, is_small].give(block)


class _Pool:
    """The segments of one stream, of small or of large blocks."""

    def __init__(self, *, is_small: bool, expandable: bool) -> None:
        self.reserved = 0
        self._is_small, self._expandable = is_small, expandable
        self._least_rest = ROUNDING if is_small or expandable else SMALL + 1
        self._num_segments = 0
        self._free: list[Block] = []
        """Size and address, in this order."""
        self._starts: dict[int, int] = {}
        """Of free blocks: the size by the address."""
        self._ends: dict[int, int] = {}
        """The same by the address behind."""

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
        if address in self._ends:  # the free neighbour before
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
