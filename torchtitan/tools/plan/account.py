"""The memory of a rank at its peak, by purpose: a replayed record.

The purpose of weights and gradients is known at their birth. Other storages are classified by their
lifetime: an activation is born in a block's forward and lives until backward, a temporary dies
before the next block starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from torchtitan.tools.plan.allocator import Allocator
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.tape import Entry, Piece, Purpose, Record

PURPOSES: tuple[Purpose, ...] = get_args(Purpose)


@dataclass(frozen=True, kw_only=True)
class Account:
    """Memory of one rank's device in one step, in bytes."""

    active: int
    """Peak of the allocator's used blocks: `memory_peak_gib` in the log."""
    reserved: int
    """Memory that the allocator has taken from the device by the end of the step."""
    peak: Entry
    """The birth at the peak."""
    piece: Piece
    """Phase and block of the peak."""
    live: Sequence[tuple[Purpose, Entry]]
    """Births of the storages that live at the peak."""
    on_host: int
    """Peak of offloaded storages in the host's memory."""

    @property
    def needed(self) -> int:
        """Bytes that the device must have, with an allowance for unmodelled memory."""
        return self.reserved + ALLOWANCE

    @property
    def by_purpose(self) -> Counter[Purpose]:
        """Live bytes at the peak."""
        sizes: Counter[Purpose] = Counter()
        for purpose, entry in self.live:
            sizes[purpose] += entry.size
        return sizes


def replay(record: Record) -> Account:
    """Replay a record through the allocator."""
    entries, purposes = record.entries, classify(record)
    allocator, addresses = Allocator(), {}
    size = peak = on_host = host_peak = active_peak = 0
    peak_index = -1
    for index, entry in enumerate(entries):
        if entry.event not in ("birth", "death"):
            continue
        is_birth = entry.event == "birth"
        change = entry.size if is_birth else -entry.size
        if entry.pool == "host":
            on_host += change
            host_peak = max(host_peak, on_host)
            continue
        size += change
        if is_birth:
            addresses[index] = allocator.take(entry.size, stream=entry.pool)
        else:
            allocator.give(addresses.pop(entry.born))
        active_peak = max(active_peak, allocator.active)
        if size > peak:
            peak, peak_index = size, index
    live = {}
    for index, entry in enumerate(entries[: peak_index + 1]):
        if entry.event == "birth" and entry.pool != "host":
            live[index] = purposes[index], entry
        elif entry.event == "death":
            live.pop(entry.born, None)
    return Account(
        active=active_peak,
        reserved=allocator.reserved,
        peak=entries[peak_index],
        piece=next(p for p, end in record.bounds() if p.start <= peak_index < end),
        live=list(live.values()),
        on_host=host_peak,
    )


def classify(record: Record) -> list[Purpose]:
    """Return the purpose of each entry's storage, from its lifetime."""
    entries = record.entries
    purposes = [entry.purpose for entry in entries]
    piece_of: list[int] = []
    for number, (piece, end) in enumerate(record.bounds()):
        piece_of += [number] * (end - piece.start)
    phases = [piece.phase for piece in record.pieces]
    blocks = [piece.block for piece in record.pieces]
    for index, entry in enumerate(entries):
        if entry.event != "death" or entry.purpose not in ("temporaries", "communication"):
            continue
        born = entry.born
        first, last = piece_of[born], piece_of[index]
        if phases[first] == "forward" and phases[last] in ("backward", None) and first != last:
            purposes[born] = "activations"
        elif (
            phases[first] == "backward"
            and first != last
            and (phases[last] in ("between", "update") or blocks[last] == blocks[first])
        ):
            purposes[born] = "gradients"  # not reduced yet
        elif entries[born].where[1].startswith("output"):
            purposes[born] = "logits"
    return purposes
