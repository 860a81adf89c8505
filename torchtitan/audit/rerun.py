"""Steps of a run trained once more, from the checkpoint before them, in a folder of their own.

The run's folder is only read. Settings, layout, folder and number of threads are those of the start
that trained the steps; what watches (validation, callbacks, sinks, traces) is left out. On the same
kind of hardware the same numbers come out, bit for bit.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torchtitan.audit.history import Stretch
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.checkpoint.settings import CheckpointConfig
from torchtitan.config.toml_files import to_toml
from torchtitan.data.settings import ValidationConfig
from torchtitan.job import Config, load_config
from torchtitan.metrics.ledger import read_ledger
from torchtitan.metrics.settings import MetricsConfig, ProfilingConfig
from torchtitan.metrics.sinks import RECORD, Row, read_rows

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
    environ: Mapping[str, str] | None = None,
) -> Rerun:
    """Train the steps of a stretch up to `last_step` again.

    `world_size` and `options`, words of the trainer's command line, ask for another layout.

    Raises:
        UserError: The steps cannot be trained again; with the last lines of what was said.
    """
    assert stretch.first_step <= last_step <= stretch.last_step
    if problem := why_not(run, stretch):
        raise DataError(f"steps {stretch.first_step} to {last_step} {problem}")
    out.mkdir(parents=True, exist_ok=True)
    file = out / "job.toml"
    file.write_text(
        to_toml(_settings(run, stretch, last_step=last_step, out=out, callbacks=callbacks)),
        encoding="utf-8",
    )
    words = [f"--job.config_file={file.resolve()}", *options]
    if options:
        load_config(words)  # a mistake in them is told here
    ranks = world_size or stretch.dims.world_size
    command = [sys.executable, "-m", "torchtitan.train", *words]
    if ranks > 1:
        launcher = ["torchtitan.launch", "--standalone", "--nproc_per_node", str(ranks), "-m"]
        command[2:2] = launcher
    began = _start_of(run, stretch)
    environment = {**os.environ, **_threads(began, ranks=ranks), **(environ or {})}
    # of a library that is not installed, and of code of the user's own
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    folder = Path(began["folder"]) if began is not None else Path.cwd()
    with (out / "rerun.log").open("wb") as log:
        done = subprocess.run(
            command,
            cwd=folder if folder.is_dir() else None,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            check=False,
        )
    if done.returncode:
        lines = (out / "rerun.log").read_text(errors="replace").splitlines()
        said = "\n  ".join(lines[-8:])
        raise DataError(
            f"steps {stretch.first_step} to {last_step} could not be trained again, the trainer "
            f"ended with code {done.returncode}; its last words:\n  {said}"
        )
    return Rerun(folder=out / "run", rows=read_rows(out / "run" / f"{RECORD}.jsonl"))


def why_not(run: Path, stretch: Stretch) -> str:
    """Say why steps cannot be trained again; nothing if they can."""
    before = stretch.first_step - 1
    starts = {int(row["step"]) for row in read_ledger(run) if row["event"] == "start"}
    inside = sorted(step for step in starts if before < step < stretch.last_step)
    if inside or stretch.doubt:
        others = f" at step {', '.join(map(str, inside))}" if inside else ""
        return (
            f"were trained by several starts{others}, and the checkpoints between them are gone; "
            f"choose a step behind a checkpoint, and keep more by checkpoint.keep_latest_k"
        )
    return ""


def _settings(
    run: Path, stretch: Stretch, *, last_step: int, out: Path, callbacks: tuple[str, ...]
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
        # what a start leaves out it leaves out once
        exclude_from_loading=own.exclude_from_loading
        if own.mode == "continue" and _start_at(run, saved) is not None
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
            save_before_seconds=None,
        )
    total = config.lr_scheduler.total_steps or config.training.steps
    # the layout may be another one
    return replace(
        config,
        job=replace(config.job, dump_folder=str((out / "run").resolve()), save_config_file=None),
        metrics=MetricsConfig(log_freq=1),
        profiling=ProfilingConfig(),
        validation=ValidationConfig(split=config.validation.split),
        checkpoint=start,
        lr_scheduler=replace(config.lr_scheduler, total_steps=total),
        training=replace(
            config.training,
            steps=last_step,
            global_batch_size=stretch.batch,
            callbacks=callbacks,
        ),
    )


def _start_at(run: Path, step: int) -> Row | None:
    """Return the row of the last start at a step."""
    starts = [row for row in read_ledger(run) if row["event"] == "start" and row["step"] == step]
    return starts[-1] if starts else None


def _start_of(run: Path, stretch: Stretch) -> Row | None:
    """Return the row of the start that trained a stretch; None: the run has no ledger."""
    starts = [row for row in read_ledger(run) if row["event"] == "start"]
    before = [row for row in starts if row["step"] < stretch.first_step]
    return before[-1] if before else None


def _threads(began: Row | None, *, ranks: int) -> dict[str, str]:
    """Return what gives each rank the threads that it had: sums of a CPU depend on them."""
    found = None if began is None else THREADS.search(began["hardware"]["device"])
    if found is not None:
        return {"OMP_NUM_THREADS": found[1]}
    return {"OMP_NUM_THREADS": "1"} if ranks > 1 and "OMP_NUM_THREADS" not in os.environ else {}


def stretch_of(history: Sequence[Stretch], step: int) -> Stretch:
    """Return the stretch that has a step; raise ConfigError if none has."""
    for stretch in history:
        if stretch.first_step <= step <= stretch.last_step:
            return stretch
    last = history[-1].last_step if history else 0
    raise ConfigError(f"--step must be one of the run's steps, 1 to {last}, got {step}")
