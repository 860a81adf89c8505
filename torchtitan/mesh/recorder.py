"""What torch's flight recorder knows: which collectives this rank has called, and from where.

The recorder keeps the newest `comm.trace_buf_size` collectives in memory. NCCL writes them to a
file itself when one takes too long; what gloo has is written here, by each rank that ends with a
fault. `python -m torchtitan.hang` reads the files of all ranks. Of gloo sends and receives are not
recorded.
"""

from __future__ import annotations

import json
import os
import pickle
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from torchtitan.mesh.settings import CommConfig

PREFIX = "TORCH_FR_DUMP_TEMP_FILE"
SUFFIX = ".json"
NEWEST = 1000
"""Collectives of a file; each takes about 1 KB."""


def enable_recorder(settings: CommConfig, *, dump_folder: Path, rank: int) -> None:
    """Tell torch to remember collectives; before the first process group is made. Files that this
    rank has left at an earlier start are removed."""
    if not settings.trace_buf_size:
        return
    folder = dump_folder / settings.save_traces_folder
    prefix = str(folder / settings.save_traces_file_prefix)
    for file in (f"{prefix}{rank}", f"{prefix}{rank}{SUFFIX}"):
        Path(file).unlink(missing_ok=True)
    if torch.cuda.is_available():
        folder.mkdir(parents=True, exist_ok=True)  # NCCL makes none
    # read when the group is made, hence the environment
    os.environ["TORCH_FR_BUFFER_SIZE"] = str(settings.trace_buf_size)
    os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] = "1"
    os.environ[PREFIX] = prefix
    os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"] = prefix


def write_collectives() -> Path | None:
    """Write what this rank has called to a file, and return it; None: nothing is remembered."""
    prefix = os.environ.get(PREFIX)
    if not prefix or not dist.is_initialized() or dist.get_world_size() == 1:
        return None
    dump = torch._C._distributed_c10d._dump_fr_trace
    known: dict[str, Any] = pickle.loads(dump())  # our own bytes
    known["entries"] = known["entries"][-NEWEST:]
    rank, groups = dist.get_rank(), {}
    for group, ranks in _world.pg_group_ranks.items():
        if not isinstance(group, dist.ProcessGroup):  # of other ranks alone
            continue
        members = json.dumps(sorted(ranks))
        groups[group.group_name] = {"desc": group.group_desc, "ranks": members}
    known |= {"pg_config": groups, "rank": rank, "written": time.time()}
    file = Path(f"{prefix}{rank}{SUFFIX}")
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(known) + "\n", encoding="utf-8")
    return file
