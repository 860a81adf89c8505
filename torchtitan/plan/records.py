"""The records of a job's pipeline ranks, rehearsed side by side."""

from __future__ import annotations

import multiprocessing
import os
import sys

from torchtitan.assemble.find import find_layout
from torchtitan.job import Config
from torchtitan.plan.job import Planned
from torchtitan.plan.rehearse import rehearse_step
from torchtitan.plan.shorten import shorten
from torchtitan.plan.tape import Record


def rehearse_ranks(planned: Planned) -> list[Record]:
    """Return the record of the first rank of each pipeline rank, in their order.

    Ranks are rehearsed in processes of their own, as many at once as there are cores.
    """
    work = [(planned.config, planned.world_size, rank) for rank in planned.first_ranks()]
    num_processes = min(len(work), os.cpu_count() or 1)
    if num_processes == 1:
        return [_rehearse(one) for one in work]
    records = []
    with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
        for record in pool.imap(_rehearse, work):
            records.append(record)
            if sys.stderr.isatty():
                ending = "\n" if len(records) == len(work) else ""
                said = f"\rrehearsed {len(records)} of {len(work)} pipeline ranks{ending}"
                sys.stderr.write(said)
    return records


def _rehearse(work: tuple[Config, int, int]) -> Record:
    config, world_size, rank = work
    short = shorten(config, find_layout(config, world_size=world_size))
    return rehearse_step(short.config, layout=short.layout, rank=rank)
