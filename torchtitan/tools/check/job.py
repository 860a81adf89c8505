"""Run all checks of a job on this rank, and print the results on rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.device import device_type, local_device
from torchtitan.base.errors import UserError
from torchtitan.base.log import plural
from torchtitan.job import Config
from torchtitan.layout import find_layout
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.mesh.ranks import init_process_group, read_rank_info
from torchtitan.parallel.layout import check_device
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.check.disks import check_checkpoints, check_data
from torchtitan.tools.check.machines import check_alike, check_memory
from torchtitan.tools.check.ranks import Checked, Ranks, find_ranks
from torchtitan.tools.check.speed import check_axes, check_products

WIDTH = len("dp_replicate")


def check_job(config: Config) -> int:
    """Check, print the table on rank 0, and return the exit code, the same on all ranks; raise
    UserError if the settings are invalid."""
    launch = read_rank_info(os.environ)
    config = resolve_model(config)
    layout = find_layout(config, world_size=launch.world_size)
    check_device(config.compile, float8=layout.float8, device_type=device_type())
    folder = Path(config.job.dump_folder)
    init_process_group(launch, device_type=device_type(), settings=config.comm, dump_folder=folder)
    ranks = find_ranks(launch, device=local_device(launch.local_rank))
    mesh = build_mesh(layout.dims, device_type=ranks.device.type)
    machines = plural(len(ranks.firsts), "machine")
    _print(ranks, f"{config.model.name} {config.model.flavor}, {layout.dims}: on {machines}")
    faults = []
    for check in _checks(ranks, config, mesh=mesh, num_parameters=layout.counts.num_parameters):
        verdict = "FAULT" if check.faults else "ok"
        _print(ranks, f"  {check.name:<{WIDTH}}  {verdict:<5}  {check.summary}")
        faults += [f"{check.name}: {fault}" for fault in check.faults]
    for fault in faults:
        _print(ranks, fault)
    code = [UserError.exit_code if faults else 0]
    dist.broadcast_object_list(code)  # only rank 0 has the faults
    return code[0]


def _checks(ranks: Ranks, config: Config, *, mesh: Mesh, num_parameters: int) -> Iterator[Checked]:
    yield check_alike(ranks, config)
    yield check_memory(ranks)
    yield check_checkpoints(ranks, config, num_parameters=num_parameters)
    yield check_data(ranks, config)
    yield check_products(ranks)
    yield from check_axes(ranks, mesh)


def _print(ranks: Ranks, line: str) -> None:
    if ranks.launch.rank == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()
