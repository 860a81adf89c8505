"""Run a measurement in separate processes: one, or several ranks on this machine.

Peak memory belongs to a process, so each measurement of it needs a separate one. Ranks connect by
gloo or NCCL on the loopback interface; the result of rank 0 is returned as JSON.
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
"""Takes the rank, a temporary folder and settings; returns figures."""


def run_ranks(measurement: Measurement, settings: dict[str, Any], *, ranks: int) -> dict[str, Any]:
    """Return the result of `measurement`, a module-level function, on rank 0 of `ranks` processes.

    Raises:
        UserError: A rank raised it.
    """
    with hold_port() as place, tempfile.TemporaryDirectory() as folder:
        port = place.getsockname()[1]
        arguments = (measurement, settings, ranks, port, folder)
        failed = None
        try:
            # forks of a process that has imported all modules start seconds earlier
            mp.get_context("forkserver").set_forkserver_preload([__name__, "torchtitan.build"])
            mp.start_processes(_work, args=arguments, nprocs=ranks, start_method="forkserver")
        except mp.ProcessExitedException as exited:
            failed = exited
        found = sorted(Path(folder).glob("error-*.json"))
        if found:
            error = json.loads(found[0].read_text(encoding="utf-8"))
            kind = DisagreementError if error["disagree"] else ConfigError
            raise kind(error["message"])
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
        message = {"disagree": isinstance(error, DisagreementError), "message": str(error)}
        (place / f"error-{rank}.json").write_text(json.dumps(message), encoding="utf-8")
        leave(1)
    if rank == 0:
        (place / "figures.json").write_text(json.dumps(figures), encoding="utf-8")
    dist.barrier()
    leave(0)
