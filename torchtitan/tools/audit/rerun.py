"""Train steps of a run again, from the checkpoint before them, in another folder.

The run's folder is only read. Settings, layout and number of threads are those of the start that
trained the steps; validation, callbacks, sinks and traces are left out. On the same hardware the
results are bit-identical. The trainer runs in the current folder: the ledger may come from a
stranger, and the folder decides which modules are found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from torchtitan.base.custom import check_trusted
from torchtitan.base.errors import DataError
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.config.sources import to_toml
from torchtitan.data.settings import ValidationConfig
from torchtitan.job import Config, find_own, load_config
from torchtitan.metrics.ledger import read_ledger
from torchtitan.metrics.rows import RECORD, Row, read_rows
from torchtitan.metrics.settings import MetricsConfig, ProfilingConfig
from torchtitan.tools.audit.history import Stretch
from torchtitan.tools.compare.layouts.launch import train

NEVER = 10**9
THREADS = re.compile(r"threads: (\d+)")


def rerun(
    run: Path,
    stretch: Stretch,
    *,
    last_step: int,
    out: Path,
    world_size: int | None = None,
    options: Sequence[str] = (),
    callbacks: tuple[str, ...] = (),
    environ: Mapping[str, str] = MappingProxyType({}),
) -> list[Row]:
    """Train the steps of a stretch up to `last_step` again, and return the figures of each step.

    The dump_folder is `out`/run; it has a checkpoint of the last step.

    Args:
        run: Folder of the run.
        stretch: Steps with the same settings.
        last_step: Last step to train.
        out: Folder for the files.
        world_size: Ranks of another layout.
        options: Settings of another layout.
        callbacks: Import paths of callbacks.
        environ: Variables to add to the environment.

    Raises:
        UserError: The steps cannot be trained again; with the last lines of the trainer's output.
    """
    assert stretch.first_step <= last_step <= stretch.last_step
    starts = read_starts(run)
    what = f"steps {stretch.first_step} to {last_step} cannot be trained again"
    if has_several_starts(starts, stretch):
        raise DataError(
            f"{what}: several starts trained them, and the checkpoints between are deleted; choose "
            f"a step after a checkpoint, and set checkpoint.keep_latest_k to keep more"
        )
    settings = _settings(run, stretch, starts=starts, last_step=last_step, out=out)
    check_own(settings)
    settings = replace(
        settings,
        training=replace(settings.training, callbacks=tuple({"path": path} for path in callbacks)),
    )
    out.mkdir(parents=True, exist_ok=True)
    file = out / "job.toml"
    file.write_text(to_toml(settings), encoding="utf-8")
    words = [f"--job.config_file={file.resolve()}", *options]
    if options:
        load_config(words)  # reports a mistake in them
    start = next((row for row in starts[::-1] if row["step"] < stretch.first_step), None)
    if start is not None:
        if start["folder"] != os.getcwd():
            what += f" (relative paths may start at {start['folder']!r}, where the run was started)"
        # the number of threads changes the order of a CPU's sums
        if threads := THREADS.search(start["hardware"]["device"]):
            environ = {"OMP_NUM_THREADS": threads[1], **environ}
    train(
        words,
        world_size=world_size or stretch.dims.world_size,
        log=out / "rerun.log",
        what=what,
        environ=environ,
    )
    return list(read_rows(out / "run" / f"{RECORD}.jsonl"))


def check_own(config: Config) -> None:
    """Raise ConfigError if settings name code that is not trusted; the trainer would import it."""
    for path, text in find_own(config):
        check_trusted(text, key=".".join(path))


def read_starts(run: Path) -> list[Row]:
    """Return the starts in a run's ledger."""
    return [row for row in read_ledger(run) if row["event"] == "start"]


def has_several_starts(starts: Sequence[Row], stretch: Stretch) -> bool:
    """Return whether a stretch cannot be trained again, because several starts trained it."""
    inside = (stretch.first_step <= row["step"] < stretch.last_step for row in starts)
    return any(inside) or bool(stretch.doubt)


def _settings(
    run: Path, stretch: Stretch, *, starts: Sequence[Row], last_step: int, out: Path
) -> Config:
    config = stretch.config
    saved, own = stretch.first_step - 1, config.checkpoint
    start = CheckpointConfig(
        enable=True,
        interval=NEVER,
        mode="continue",
        initial_load_path=str((run / own.local_folder).resolve()),
        initial_load_model_only=False,
        load_step=saved,
        # only the start at this step left them out
        exclude_from_loading=own.exclude_from_loading
        if own.mode != "finetune" and any(row["step"] == saved for row in starts)
        else (),
    )
    if saved == 0:  # without a checkpoint, start like the run
        start = replace(
            own,
            enable=True,
            interval=NEVER,
            folder="checkpoint",
            last_save_model_only=False,
            last_save_in_hf=False,
            export_dtype="float32",
            keep_best=0,
        )
    total = config.lr_scheduler.total_steps or config.training.steps
    return replace(
        config,
        job=replace(
            config.job,
            dump_folder=str((out / "run").resolve()),
            time_limit_seconds=None,
        ),
        metrics=MetricsConfig(log_freq=1),
        profiling=ProfilingConfig(),
        validation=ValidationConfig(holdout_fraction=config.validation.holdout_fraction),
        checkpoint=start,
        lora=replace(config.lora, export_format="merged"),  # nothing is exported
        lr_scheduler=replace(config.lr_scheduler, total_steps=total),
        training=replace(
            config.training,
            steps=last_step,
            global_batch_size=stretch.batch,  # the layout may be another one
            callbacks=(),
        ),
    )
