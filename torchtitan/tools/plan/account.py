"""The memory of a rank by its purpose, at the peak and over the step: a replayed record.

The purpose of weights and gradients is known at their birth. Other storages are classified by their
lifetime: an activation is born in a block's forward and lives until backward, a temporary dies
before the next block starts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from torchtitan.tools.plan.allocator import Allocator
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.tape import Entry, Kind, Phase, Record

KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """Storages of one operator of one module that live at the peak, over all blocks."""

    kind: Kind
    operator: str
    module: str
    num: int
    size: int
    """Bytes."""


@dataclass(frozen=True, kw_only=True)
class Account:
    """Memory of one rank's device in one step, in bytes."""

    active: int
    """Peak of the allocator's used blocks: `memory_peak_gib` in the log."""
    reserved: int
    """Memory that the allocator has taken from the device by the end of the step."""
    by_kind: Mapping[Kind, int]
    """Live bytes at the peak."""
    where: Entry
    """The birth at the peak."""
    during: tuple[Phase | None, int | None]
    """Phase and block of the peak."""
    tenants: Sequence[Tenant]
    """The live storages at the peak by operator, largest first."""
    curve: Sequence[Mapping[Kind, int]]
    """Live bytes over the step: the peak of each interval."""
    on_host: int
    """Peak of offloaded storages in the host's memory."""

    @property
    def needed(self) -> int:
        """Bytes that the device must have, with an allowance for unmodelled memory."""
        return self.reserved + ALLOWANCE


def replay(record: Record, *, num_points: int = 400) -> Account:
    """Replay a record through the allocator."""
    entries, kinds = record.entries, classify(record)
    allocator, addresses = Allocator(), {}
    live: Counter[Kind] = Counter()
    now = peak = host = most_on_host = peak_active = 0
    start = next((p.start for p in record.pieces[1:] if p.phase != "state"), 0)
    width = max(1, -(-(len(entries) - start) // num_points))
    at, interval, most = -1, -1, 0
    curve: list[dict[Kind, int]] = []
    for index, entry in enumerate(entries):
        if entry.what not in ("birth", "death"):
            continue
        sign = 1 if entry.what == "birth" else -1
        if entry.pool == "host":
            host += sign * entry.size
            most_on_host = max(most_on_host, host)
            continue
        now += sign * entry.size
        live[kinds[index if sign > 0 else entry.born]] += sign * entry.size
        if sign > 0:
            addresses[index] = allocator.take(entry.size, stream=entry.pool)
        else:
            allocator.give(addresses.pop(entry.born))
        peak_active = max(peak_active, allocator.active)
        if now > peak:
            peak, at = now, index
        if index < start:
            continue
        if (index - start) // width > interval:
            interval, most = (index - start) // width, -1
            curve.append({})
        if now > most:
            most, curve[-1] = now, dict(live)
    tenants = _tenants(entries, kinds, at=at)
    by_kind: Counter[Kind] = Counter()
    for tenant in tenants:
        by_kind[tenant.kind] += tenant.size
    piece = next(p for p, end in record.bounds() if p.start <= at < end)
    return Account(
        active=peak_active,
        reserved=allocator.reserved,
        by_kind=dict(by_kind.most_common()),
        where=entries[at],
        during=(piece.phase, piece.block),
        tenants=tenants,
        curve=curve,
        on_host=most_on_host,
    )


def classify(record: Record) -> list[Kind]:
    """Return the purpose of each entry's storage, from its lifetime."""
    entries = record.entries
    kinds = [entry.kind for entry in entries]
    piece_of: list[int] = []
    for number, (piece, end) in enumerate(record.bounds()):
        piece_of += [number] * (end - piece.start)
    phases = [piece.phase for piece in record.pieces]
    blocks = [piece.block for piece in record.pieces]
    for index, entry in enumerate(entries):
        if entry.what != "death" or entry.kind not in ("temporaries", "communication"):
            continue
        born = entry.born
        first, last = piece_of[born], piece_of[index]
        if phases[first] == "forward" and phases[last] in ("backward", None) and first != last:
            kinds[born] = "activations"
        elif (
            phases[first] == "backward"
            and first != last
            and (phases[last] in ("between", "update") or blocks[last] == blocks[first])
        ):
            kinds[born] = "gradients"  # not reduced yet
        elif entries[born].where[1].startswith("output"):
            kinds[born] = "logits"
    return kinds


def _tenants(entries: Sequence[Entry], kinds: Sequence[Kind], *, at: int) -> list[Tenant]:
    """Return the storages that live after an entry, by operator."""
    live = {}
    for index, entry in enumerate(entries[: at + 1]):
        if entry.what == "birth" and entry.pool != "host":
            live[index] = entry
        elif entry.what == "death":
            live.pop(entry.born, None)
    sizes: Counter[tuple[Kind, str, str]] = Counter()
    nums: Counter[tuple[Kind, str, str]] = Counter()
    for index, entry in live.items():
        key = kinds[index], entry.where[0], entry.where[1]
        sizes[key] += entry.size
        nums[key] += 1
    return [
        Tenant(kind=key[0], operator=key[1], module=key[2], num=nums[key], size=size)
        for key, size in sizes.most_common()
    ]
