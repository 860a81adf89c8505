"""What a start writes down beside its figures: its settings, its hardware, and what was done."""

from __future__ import annotations

import os
from dataclasses import asdict
from pathlib import Path

import torch.distributed as dist

from torchtitan.base.device import device_name
from torchtitan.base.errors import CheckpointError
from torchtitan.config.toml_files import to_toml
from torchtitan.job import Config
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.metrics.ledger import Hardware
from torchtitan.resume_rules import CONFIG_FILE, shaping_code
from torchtitan.trainer import Run


def write_start(config: Config, *, run: Run, loaded: Path | None) -> None:
    """Write down on rank 0, which has the ledger, what a run starts on, and what it has `loaded`.

    Raises:
        UserError: A file cannot be written.
    """
    if (ledger := run.ledger) is None:
        return
    dims, step = run.mesh.dims, run.progress.step
    hardware = Hardware(
        resumed_from=step,
        world_size=dims.world_size,
        ranks_per_machine=int(os.environ.get("LOCAL_WORLD_SIZE", dims.world_size)),
        device=device_name(run.device),
    )
    ledger.start(
        step,
        config=to_toml(config),
        layout=str(dims),
        world_size=dims.world_size,
        loaded=None if loaded is None else str(loaded),
        code=shaping_code(config),
        hardware=asdict(hardware),
    )


def write_config(config: Config) -> None:
    """Write the resolved settings into the run's folder, from rank 0."""

    def write() -> None:
        for name in filter(None, (CONFIG_FILE, config.job.save_config_file)):
            path = Path(config.job.dump_folder) / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(to_toml(config), encoding="utf-8")
            except OSError as error:
                raise CheckpointError(
                    f"the settings must be written to a file in job.dump_folder, got {path}, which "
                    f"cannot be written: {error.strerror}; move away what is there, or choose "
                    f"another job.save_config_file or job.dump_folder"
                ) from error

    on_first_rank(write, group=dist.group.WORLD)
