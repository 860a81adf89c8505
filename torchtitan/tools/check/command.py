"""Look at the machines of a job before it starts, with all its ranks.

    python -m torchtitan.launch ... -m torchtitan check --job.config_file F [settings]

Every rank takes part, so what is found is what the job would meet: other versions or other code,
memory and disks, data that differ, a slow device, a slow link. Prints one table and, for
what does not fit, what to do. `--json FILE` writes all figures. Exit codes: 0 all is well; 2
something does not fit, or the job's settings are wrong.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.device import device_type, local_device
from torchtitan.base.errors import UserError
from torchtitan.base.log import plural
from torchtitan.base.urls import local_path
from torchtitan.job import Config, load_config
from torchtitan.layout import find_layout
from torchtitan.mesh.dims import Mesh, build_mesh
from torchtitan.mesh.ranks import init_process_group, read_rank_info
from torchtitan.parallel.layout import check_device
from torchtitan.resume_rules import resolve_model
from torchtitan.tools.check.disks import check_checkpoints, check_data
from torchtitan.tools.check.machines import check_alike, check_memory
from torchtitan.tools.check.overlap import check_overlap
from torchtitan.tools.check.ranks import Checked, Ranks, find_ranks
from torchtitan.tools.check.speed import check_axes, check_products

WIDTH = len("dp_replicate")


def main(argv: Sequence[str]) -> int:
    """Check on this rank; return the exit code, the same on all ranks."""
    parser = argparse.ArgumentParser(
        prog="python -m torchtitan check", description=__doc__, allow_abbrev=False
    )
    parser.add_argument("--json", type=local_path, metavar="FILE", help="write all figures")
    arguments, settings = parser.parse_known_args(argv)
    launch = read_rank_info(os.environ)
    if launch.rank != 0:
        logging.disable()
    config = resolve_model(load_config(settings))
    layout = find_layout(config, world_size=launch.world_size)
    check_device(config.compile, float8=layout.float8, device_type=device_type())
    folder = Path(config.job.dump_folder)
    init_process_group(launch, device_type=device_type(), settings=config.comm, dump_folder=folder)
    ranks = find_ranks(launch, device=local_device(launch.local_rank))
    mesh = build_mesh(layout.dims, device_type=ranks.device.type)
    machines = plural(len(ranks.firsts), "machine")
    say(ranks, f"{config.model.name} {config.model.flavor}, {layout.dims}: on {machines}")
    checks = []
    num_parameters = layout.counts.num_parameters
    for one in check(ranks, config, mesh=mesh, num_parameters=num_parameters):
        checks.append(one)
        verdict = "FAULT" if one.findings else "ok"
        say(ranks, f"  {one.name:<{WIDTH}}  {verdict:<5}  {one.summary}")
    findings = [(one.name, finding) for one in checks for finding in one.findings]
    for name, finding in findings:
        say(ranks, f"\n{name}: {finding.what}\n  {finding.remedy}")
    if launch.rank == 0 and arguments.json is not None:
        write(arguments.json, ranks, checks)
    code = [UserError.exit_code if findings else 0]
    dist.broadcast_object_list(code)  # rank 0 alone knows
    return code[0]


def check(ranks: Ranks, config: Config, *, mesh: Mesh, num_parameters: int) -> Iterator[Checked]:
    """Run all checks, in this order on every rank; what they say is whole on rank 0."""
    yield check_alike(ranks, config)
    yield check_memory(ranks)
    yield check_checkpoints(ranks, config, num_parameters=num_parameters)
    yield check_data(ranks, config)
    yield from check_overlap(ranks, config)
    yield check_products(ranks)
    yield from check_axes(ranks, mesh)


def say(ranks: Ranks, line: str) -> None:
    """Print a line of the table as soon as it is known."""
    if ranks.launch.rank == 0:
        sys.stdout.write(f"{line}\n")
        sys.stdout.flush()


def write(file: Path, ranks: Ranks, checks: Sequence[Checked]) -> None:
    """Write all figures as JSON."""
    told = {"machines": list(ranks.machines), "checks": [one.as_json() for one in checks]}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
