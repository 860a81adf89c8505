"""Runs a measurement in processes of its own: one, or several ranks that share this machine.

A peak of memory belongs to a process, so what is to be compared by it needs one each. Ranks of
gloo or NCCL meet on the loopback; what rank 0 returns comes back as JSON.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.multiprocessing as mp

from scripts.benchmarks.pairs import DisagreementError
from scripts.ports import hold_port
from torchtitan.base.device import device_type
from torchtitan.base.errors import ConfigError, UserError
from torchtitan.mesh.ranks import RankInfo, init_process_group, leave
from torchtitan.mesh.settings import CommConfig

Measurement = Callable[[RankInfo, Path, dict[str, Any]], dict[str, Any]]
"""From this rank's place, a folder that goes again and settings, to figures."""


def run_ranks(measurement: Measurement, settings: dict[str, Any], *, ranks: int) -> dict[str, Any]:
    """Return what `measurement`, a function of a module, returns on rank 0 of `ranks` processes.

    Raises:
        UserError: A rank has raised one.
    """
    with hold_port() as place, tempfile.TemporaryDirectory() as folder:
        port = place.getsockname()[1]
        arguments = (measurement, settings, ranks, port, folder)
        failed = None
        try:
            # forks of one process that has imported all there is: seconds less for each
            mp.get_context("forkserver").set_forkserver_preload([__name__, "torchtitan.build"])
            mp.start_processes(_work, args=arguments, nprocs=ranks, start_method="forkserver")
        except mp.ProcessExitedException as exited:
            failed = exited
        found = sorted(Path(folder).glob("error-*.json"))
        if found:
            said = json.loads(found[0].read_text(encoding="utf-8"))
            kind = DisagreementError if said["disagree"] else ConfigError
            raise kind(said["message"])
        if failed is not None:
            raise failed
        figures: dict[str, Any] = json.loads((Path(folder) / "figures.json").read_text("utf-8"))
        return figures


def _work(
    rank: int,
    measurement: Measurement,
    settings: dict[str, Any],
    ranks: int,
    port: int,
    folder: str,
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    launch = RankInfo(rank=rank, local_rank=rank, world_size=ranks)
    place = Path(folder)
    init_process_group(
        launch, device_type=device_type(), settings=CommConfig(), dump_folder=place / "run"
    )
    try:
        figures = measurement(launch, place, settings)
    except UserError as error:
        said = {"disagree": isinstance(error, DisagreementError), "message": str(error)}
        (place / f"error-{rank}.json").write_text(json.dumps(said), encoding="utf-8")
        leave(1)
    if rank == 0:
        (place / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    leave(0)
