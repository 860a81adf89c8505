"""Tiny jobs to plan."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from torchtitan.job import Config
from torchtitan.parallel.layout import Layout
from torchtitan.tools.plan.devices import DEVICES
from torchtitan.tools.plan.job import Planned, plan_job
from torchtitan.tools.plan.rehearse import rehearse
from torchtitan.tools.plan.tape import Record

TINY = """
[model]
flavor = "tiny8"
num_layers = 3
vocab_size = 264
tokenizer_path = "byte"
[training]
dataset = "synthetic_masked"
seq_len = 64
local_batch_size = 8
steps = 20
mixed_precision_param = "bfloat16"
[lr_scheduler]
warmup_steps = 1
[activation_checkpoint]
mode = "none"
"""


def planned(folder: Path, *arguments: str, world: int = 1) -> Planned:
    """Return a job as commands find it, on machines of 2 GPUs."""
    path = folder / "job.toml"
    path.write_text(TINY)
    return plan_job(
        [f"--job.config_file={path}", *arguments],
        world_size=world,
        device=DEVICES["H100"],
        gpus_per_node=2,
    )


def placed(folder: Path, *arguments: str, world: int = 1) -> tuple[Config, Layout]:
    """Return what is rehearsed of it, nothing left out."""
    job = planned(folder, *arguments, world=world)
    return job.config, job.layout


def recorded(*arguments: str, world: int = 1, rank: int = 0) -> Record:
    """Return the record of a step of one rank. Tests share it and leave it as it is."""
    return _recorded(arguments, world, rank)


@cache
def _recorded(arguments: tuple[str, ...], world: int, rank: int) -> Record:
    with TemporaryDirectory() as folder:
        short = planned(Path(folder), *arguments, world=world).shortened
    return rehearse(short.config, layout=short.layout, rank=rank)
