"""Steps of a run trained once more, from the checkpoint before them, in a folder of their own.

The run's folder is only read. Settings, layout and number of threads are those of the start that
trained the steps; what watches (validation, callbacks, sinks, traces) is left out. On the same kind
of hardware the same numbers come out, bit for bit. The trainer runs in the current folder, for the
ledger may be a stranger's and a folder decides which modules are found.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, kw_only=True)
class Rerun:
    """What came of it."""

    folder: Path
    """The dump_folder, with a checkpoint of the last step."""
    rows: list[Row]
    """The figures of each step."""


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
) -> Rerun:
    """Train the steps of a stretch up to `last_step` again.

    `world_size` and `options`, words of the trainer's command line, ask for another layout.

    Raises:
        UserError: The steps cannot be trained again; with the last lines of what was said.
    """
    assert stretch.first_step <= last_step <= stretch.last_step
    starts = read_starts(run)
    if problem := why_not(starts, stretch):
        raise DataError(f"steps {stretch.first_step} to {last_step} {problem}")
    settings = _settings(run, stretch, starts=starts, last_step=last_step, out=out)
    for path, text in find_own(settings):  # to the trainer the file is the user's
        check_trusted(text, key=".".join(path))
    training = replace(settings.training, callbacks=callbacks)
    out.mkdir(parents=True, exist_ok=True)
    file = out / "job.toml"
    file.write_text(to_toml(replace(settings, training=training)), encoding="utf-8")
    words = [f"--job.config_file={file.resolve()}", *options]
    if options:
        load_config(words)  # a mistake in them is told here
    ranks = world_size or stretch.dims.world_size
    began = _start_of(starts, stretch)
    what = f"steps {stretch.first_step} to {last_step} could not be trained again"
    if began is not None and began["folder"] != os.getcwd():
        what += f" (the run was started in {began['folder']!r}, and relative paths begin there)"
    train(
        words,
        world_size=ranks,
        log=out / "rerun.log",
        what=what,
        environ={**_threads(began), **environ},
    )
    return Rerun(folder=out / "run", rows=read_rows(out / "run" / f"{RECORD}.jsonl"))


def read_starts(run: Path) -> list[Row]:
    """Return the starts of a run, as its ledger has them."""
    return [row for row in read_ledger(run) if row["event"] == "start"]


def why_not(starts: Sequence[Row], stretch: Stretch) -> str:
    """Say why steps cannot be trained again; nothing if they can."""
    before = stretch.first_step - 1
    inside = sorted({row["step"] for row in starts if before < row["step"] < stretch.last_step})
    if inside or stretch.doubt:
        others = f" at step {', '.join(map(str, inside))}" if inside else ""
        return (
            f"were trained by several starts{others}, and the checkpoints between them are gone; "
            f"choose a step behind a checkpoint, and keep more by checkpoint.keep_latest_k"
        )
    return ""


def _settings(
    run: Path,
    stretch: Stretch,
    *,
    starts: Sequence[Row],
    last_step: int,
    out: Path,
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
        grow_vocab=own.grow_vocab,  # beside an adapter: which rows are trained
        # what a start leaves out it leaves out once
        exclude_from_loading=own.exclude_from_loading
        if own.mode != "finetune" and any(row["step"] == saved for row in starts)
        else (),
    )
    if saved == 0:  # no checkpoint: it begins as the run did
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
            save_config_file=None,
            time_limit_seconds=None,
        ),
        metrics=MetricsConfig(log_freq=1),
        profiling=ProfilingConfig(),
        validation=ValidationConfig(holdout_fraction=config.validation.holdout_fraction),
        checkpoint=start,
        lora=replace(config.lora, export_format="merged"),  # it exports nothing
        lr_scheduler=replace(config.lr_scheduler, total_steps=total),
        training=replace(
            config.training,
            steps=last_step,
            global_batch_size=stretch.batch,  # the layout may be another one
            callbacks=(),
        ),
    )


def _start_of(starts: Sequence[Row], stretch: Stretch) -> Row | None:
    """Return the start that trained a stretch; None: the run has no ledger."""
    before = [row for row in starts if row["step"] < stretch.first_step]
    return before[-1] if before else None


def _threads(began: Row | None) -> dict[str, str]:
    """Return what gives each rank the threads that it had: sums of a CPU depend on them."""
    found = None if began is None else THREADS.search(began["hardware"]["device"])
    return {} if found is None else {"OMP_NUM_THREADS": found[1]}
