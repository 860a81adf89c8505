"""The command `memory`: the peak memory of each pipeline rank's device, and whether it fits."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator, Sequence

from torchtitan.checkpoint.manager import PINNED
from torchtitan.tools.plan.account import PURPOSES, Account, replay
from torchtitan.tools.plan.allocator import GIB, MIB
from torchtitan.tools.plan.devices import ALLOWANCE
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.ranks import rehearse_ranks
from torchtitan.tools.plan.tape import Record
from torchtitan.tools.verbs import format_table

NUM_STORAGES = 8
STEP_COUNT_BYTES = 4


def plan_memory(planned: Planned, _: argparse.Namespace) -> Iterator[str]:
    """Yield the account of each pipeline rank, and whether all fit, as text."""
    records = rehearse_ranks(planned)
    accounts = [replay(record) for record in records]
    fullest_rank, fullest = max(
        zip(planned.pipeline_ranks, accounts, strict=True), key=lambda pair: pair[1].needed
    )
    device = planned.device
    left = (device.memory - fullest.needed) / GIB
    verdict = "fits" if left >= 0 else "DOES NOT FIT (`plan layout` lists layouts that fit)"
    parts = [
        planned.headline(),
        _table(planned, accounts, [staged(planned, record) for record in records]),
        f"{verdict}: {device.name} has {device.memory / GIB:.1f} GiB, {abs(left):.1f} GiB are "
        f"{'left' if left >= 0 else 'missing'} on the fullest rank",
        _peak(fullest_rank, fullest),
        "Limits of a plan are in docs/plan.md.",
    ]
    yield "\n\n".join(parts) + "\n"


def staged(planned: Planned, record: Record) -> int:
    """Return the bytes of the host for a rank's copy of the state while it is saved.

    Sizes of page-locked memory are powers of two. Step counts, the scalars among the state, are
    saved as one.
    """
    settings = planned.config.checkpoint
    if not settings.enable or settings.async_mode == "disabled":
        return 0
    entries = record.of_phase("state")
    counts = {entry.size for entry in entries if entry.size <= STEP_COUNT_BYTES}
    return sum(counts) + sum(
        1 << (entry.size - 1).bit_length()
        if settings.async_mode == PINNED and entry.pool != "host"
        else entry.size
        for entry in entries
        if entry.size > STEP_COUNT_BYTES
    )


def _table(planned: Planned, accounts: Sequence[Account], copies: Sequence[int]) -> str:
    """Return the memory by kind, with a column per pipeline rank."""
    ranks = planned.pipeline_ranks
    both = zip(accounts, copies, strict=True)
    rows = [
        *((purpose, [a.by_purpose[purpose] for a in accounts]) for purpose in PURPOSES),
        ("live at the peak", [a.by_purpose.total() for a in accounts]),
        ("active (rounded up)", [a.active for a in accounts]),
        ("reserved by torch", [a.reserved for a in accounts]),
        ("not modelled (allowance)", [ALLOWANCE] * len(accounts)),
        ("needed", [a.needed for a in accounts]),
        ("on the host", [a.on_host for a in accounts]),
        ("on the host while saving", [copy and a.on_host + copy for a, copy in both]),
    ]
    names = [f"pp {number}" if len(ranks) > 1 else "each rank" for number in ranks]
    shown = ([name, *map(_size, sizes)] for name, sizes in rows if any(sizes))
    return "\n".join(format_table([["", *names], *shown]))


def _size(size: int) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 10 else f"{size / MIB:.2f} MiB"


def _peak(rank: int, account: Account) -> str:
    phase, block = account.piece[1:]
    during = "between blocks" if block is None else f"in the {phase} of layer {block}"
    if phase == "validation" and block is None:
        during = "in the validation"
    operator, module = account.peak.where[:2]
    lines = [
        f"The peak of pipeline rank {rank} is {during}, with {operator}"
        + (f" of {module}" if module else "")
        + ". The largest storages are:"
    ]
    sizes: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for purpose, entry in account.live:
        name = f"{purpose:<17} {entry.where[0]} {entry.where[1]}".rstrip()
        sizes[name] += entry.size
        counts[name] += 1
    for name, size in sizes.most_common(NUM_STORAGES):
        lines.append(f"  {_size(size):>12}  {counts[name]:>5} x  {name}")
    return "\n".join(lines)
