"""The records of a job's pipeline ranks, rehearsed side by side."""

from __future__ import annotations

import logging
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

from torchtitan.assemble.find import find_layout
from torchtitan.config.toml_files import to_toml
from torchtitan.job import load_config
from torchtitan.plan.job import Planned
from torchtitan.plan.rehearse import rehearse_step
from torchtitan.plan.shorten import shorten
from torchtitan.plan.tape import Record


def rehearse_ranks(planned: Planned) -> list[Record]:
    """Return the record of the first rank of each pipeline rank, in their order.

    Ranks are rehearsed in processes of their own, as many at once as there are cores.
    """
    ranks = planned.first_ranks()
    num_processes = min(len(ranks), os.cpu_count() or 1)
    if num_processes == 1:
        short = planned.shortened
        return [rehearse_step(short.config, layout=short.layout, rank=ranks[0])]
    records = []
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "job.toml"
        file.write_text(to_toml(planned.config), encoding="utf-8")
        work = [(str(file), planned.world_size, rank) for rank in ranks]
        with multiprocessing.get_context("spawn").Pool(num_processes) as pool:
            for record in pool.imap(_rehearse, work):
                records.append(record)
                if sys.stderr.isatty():
                    ending = "\n" if len(records) == len(ranks) else ""
                    said = f"\rrehearsed {len(records)} of {len(ranks)} pipeline ranks{ending}"
                    sys.stderr.write(said)
    return records


def _rehearse(work: tuple[str, int, int]) -> Record:
    file, world_size, rank = work
    logging.disable(logging.WARNING)  # the command itself has said it
    config = load_config([f"--job.config_file={file}"])
    short = shorten(config, find_layout(config, world_size=world_size))
    return rehearse_step(short.config, layout=short.layout, rank=rank)
