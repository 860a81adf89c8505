"""The command `traffic`: bytes that a rank sends in a step, counted, with formulas to compare.

These formulas are used in papers. For P parameters of the rank's stage (1/tp of the sharded ones),
b bytes per gathered and r per reduced element, and m microbatches:

    fsdp, gathers         b P for forward, and b P for backward without the weights that are kept
    fsdp, reductions      r P per microbatch; with a pipeline once for all microbatches
    dp_replicate          r P / fsdp, once
    tp, a block           2 gathers and 2 reductions of the stream in forward, 2 each in backward
    cp                    the keys and values of each layer, to each rank, in forward and backward
    pp                    the stream of each microbatch, and its gradient
    ep                    K rows of the stream per token, 2 ways in forward and 2 in backward

Sizes are those of unsharded tensors, as in a collective's argument or result. `on node` and `off
node` are the bytes that a rank sends for it (`links.py`).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from torchtitan.tools.plan.allocator import GIB
from torchtitan.tools.plan.job import Planned
from torchtitan.tools.plan.links import Collective, axes_of, collective
from torchtitan.tools.plan.ranks import rehearse_ranks
from torchtitan.tools.plan.tape import Record


@dataclass(frozen=True, kw_only=True)
class Row:
    """Collectives of one kind over one axis, per rank and step."""

    axis: str
    collective: Collective
    module: str
    calls: float
    size: float
    """Bytes of the unsharded tensors."""
    on_node: float
    off_node: float
    """Bytes that the rank sends within its machine and to other machines."""


def count_traffic(planned: Planned, record: Record, *, by_module: bool) -> list[Row]:
    """Count the messages of a rank in a step."""
    axes = axes_of(planned.layout.dims, gpus_per_node=planned.gpus_per_node)
    sums: dict[tuple[str, Collective, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for piece, end in record.bounds():
        for entry in record.entries[piece.start : end]:
            if entry.event != "message":
                continue
            axis, operator, module = entry.where
            operation = collective(operator)
            times = planned.shortened.times(entry, piece.phase)
            moved = axes[axis].moved(operation, entry.size) if axis in axes else (0.0, 0.0)
            row = sums[axis, operation, module if by_module else ""]
            for index, value in enumerate((1, entry.size, *moved)):
                row[index] += times * value
    return [
        Row(
            axis=key[0],
            collective=key[1],
            module=key[2],
            calls=row[0],
            size=row[1],
            on_node=row[2],
            off_node=row[3],
        )
        for key, row in sorted(sums.items())
    ]


def plan_traffic(planned: Planned, arguments: argparse.Namespace) -> str:
    """Return the table of each pipeline rank's traffic."""
    parts = [planned.headline()]
    records = rehearse_ranks(planned, validates=False)
    for number, record in zip(planned.pipeline_ranks, records, strict=True):
        rows = count_traffic(planned, record, by_module=arguments.by_module)
        title = f"pipeline rank {number}, " if len(records) > 1 else ""
        parts.append(f"{title}GiB of a rank in a step\n{_table(rows)}")
    return "\n\n".join(parts) + "\n"


def _table(rows: Sequence[Row]) -> str:
    lines = [
        f"{'axis':<13}{'collective':<16}{'calls':>8}{'whole':>10}{'on node':>10}{'off node':>10}"
    ]
    lines += [
        f"{row.axis:<13}{row.collective:<16}{row.calls:>8.0f}{row.size / GIB:>10.3f}"
        f"{row.on_node / GIB:>10.3f}{row.off_node / GIB:>10.3f}  {row.module}".rstrip()
        for row in rows
    ]
    return "\n".join(lines)
