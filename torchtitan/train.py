"""The trainer's command: settings -> process group -> run -> exit code. Nothing is built here.

Exit codes: 0 done; 2 a setting, file or checkpoint has to be mended, said in one message; 3 the
loss or gradient norm was not finite; anything else is a fault of ours, with its traceback."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import torch.distributed as dist

from torchtitan.assemble import assemble
from torchtitan.base.device import device_type
from torchtitan.base.errors import UserError
from torchtitan.base.log import init_logging, is_terminal, shown_ranks, use_color
from torchtitan.config.load import load_config
from torchtitan.config.schema import Config
from torchtitan.mesh.process_group import (
    init_process_group,
    is_first_to,
    leave,
    read_launch,
)
from torchtitan.metrics.progress import Summary, progress_bar, show_summary, shows_bar
from torchtitan.trainer import Trainer

SECONDS_FOR_RANK_0_TO_SPEAK = 5


def train(argv: Sequence[str]) -> None:
    """Run the job that the command line describes on this rank.

    Raises:
        UserError: Something outside the library has to change.
    """
    launch, log_rank = read_launch(os.environ), os.environ.get("LOG_RANK")
    shown = shown_ranks(log_rank or "0", world_size=launch.world_size)
    log = partial(init_logging, rank=launch.rank, world_size=launch.world_size, log_rank=log_rank)
    log(folder=None, color=False)  # the settings, which name the folder, may give notices already
    config = load_config(argv)
    folder = Path(config.job.dump_folder)
    color = use_color(sys.stderr, disabled=config.metrics.disable_color_printing)
    log(folder=folder, color=color)
    init_process_group(launch, device_type=device_type(), settings=config.comm, dump_folder=folder)
    started = time.monotonic()
    run = assemble(config, launch=launch, color=color)
    trainer = Trainer(run)
    with progress_bar(
        done_steps=run.progress.step,
        total_steps=run.num_steps,
        show=shows_bar(launch.rank, shown=shown),
        color=color,
    ) as on_step:
        trainer.train(on_step=on_step)
    trainer.close()
    if launch.rank == min(shown):
        show_summary(
            summarize(trainer, seconds=time.monotonic() - started, places=find_places(config)),
            terminal=is_terminal(sys.stderr),
            color=color,
        )


def summarize(trainer: Trainer, *, seconds: float, places: dict[str, str]) -> Summary:
    """Return what a finished run comes to."""
    run, row = trainer.run, trainer.last_row
    return Summary(
        num_steps=run.progress.step,
        num_tokens=run.progress.tokens_seen,
        final_loss=None if row is None else row["loss"],
        tokens_per_second=run.meter.average_tokens_per_second,
        seconds=seconds,
        places=places,
    )


def find_places(config: Config) -> dict[str, str]:
    """Return where the run's output lies."""
    folder, metrics = Path(config.job.dump_folder), config.metrics
    places = {"metrics": folder / "metrics.jsonl", "logs": folder / "logs"}
    if config.checkpoint.enable:
        places["checkpoints"] = folder / config.checkpoint.folder
    if metrics.enable_tensorboard:
        places["tensorboard"] = folder / metrics.save_tb_folder
    if metrics.enable_wandb:
        places["wandb"] = folder / "wandb"
    return {name: str(path) for name, path in places.items()}


def main(argv: Sequence[str]) -> int:
    """Train, and return the exit code."""
    try:
        train(argv)
    except UserError as error:
        _report(error)
        return error.exit_code
    return 0


def _report(error: UserError) -> None:
    """Say what is wrong once a job, though every rank may have met the same mistake."""
    if dist.is_initialized():
        if is_first_to("report an error"):
            sys.stderr.write(f"{error}\n")
        return
    if os.environ.get("LOCAL_RANK", "0") != "0":
        # the launcher ends all ranks when one ends: only a mistake that rank 0 has not met is said
        time.sleep(SECONDS_FOR_RANK_0_TO_SPEAK)
    sys.stderr.write(f"{error}\n")


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
