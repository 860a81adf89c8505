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
    names = [f"pp {number}" if len(ranks) > 1 else "each rank" for number in ranks]
    sizes = [account.by_purpose for account in accounts]
    rows: list[tuple[str, list[int]]] = [
        (purpose, [size[purpose] for size in sizes]) for purpose in PURPOSES
    ]
    rows = [row for row in rows if any(row[1])]
    rows.append(("live at the peak", [size.total() for size in sizes]))
    rows.append(("active (rounded up)", [account.active for account in accounts]))
    rows.append(("reserved by torch", [account.reserved for account in accounts]))
    rows.append(("not modelled (allowance)", [ALLOWANCE] * len(accounts)))
    rows.append(("needed", [account.needed for account in accounts]))
    if any(account.on_host for account in accounts):
        rows.append(("on the host", [account.on_host for account in accounts]))
    if any(copies):
        both = zip(accounts, copies, strict=True)
        rows.append(("on the host while saving", [a.on_host + copy for a, copy in both]))
    lines = [" " * 25 + "".join(f"{name:>12}" for name in names)]
    lines += [
        f"{name:<25}" + "".join(f"{_size(size):>12}" for size in sizes) for name, sizes in rows
    ]
    return "\n".join(lines)


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
