"""Where the figures of a logged step go: a file, the console, TensorBoard, Weights & Biases.

A row is a flat dictionary of numbers, None where there is no figure, or lists of them, which only
the file and sinks of the user's own take, and a sink is anything that
can `write` a row and `close`. Which of them exist is decided once, by `build_sinks`; the step loop
writes to each in a list and knows none, so a switched-off sink costs nothing. `metrics.jsonl` is
always written: it is the record of the run, one JSON object a line with every digit, and scripts
and tests read it. The others show the same figures. Their packages load only when they are switched
on.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan.base.errors import ConfigError, DataError
from torchtitan.base.log import Style, paint
from torchtitan.base.own import check_methods, make
from torchtitan.metrics.rows import RECORD, Row, read_rows

if TYPE_CHECKING:
    from torchtitan.metrics.settings import MetricsConfig

logger = logging.getLogger(__name__)

# torchtitan's tags, so that runs of both can be laid over each other. A figure without one goes by
# its own name.
TAGS: Mapping[str, str] = {
    "loss": "loss_metrics/global_avg_loss",
    "max_loss": "loss_metrics/global_max_loss",
    "num_tokens": "n_tokens_seen",
    "tokens_per_second_per_device": "throughput(tps)",
    "tflops_per_device": "tflops",
    "mfu": "mfu(%)",
    "step_time_s": "time_metrics/end_to_end(s)",
    "data_time_s": "time_metrics/data_loading(s)",
    "memory_peak_gib": "memory/max_active(GiB)",
    "validation_loss": "validation_metrics/global_avg_loss",
    "validation_perplexity": "validation_metrics/perplexity",
    "validation_time_s": "validation_metrics/time(s)",
}

# What the console shows of a row: label, format, colour.
_CONSOLE: Mapping[str, tuple[str, str, Style]] = {
    "step": ("step", "{:>6d}", "red"),
    "loss": ("loss", "{:8.5f}", "green"),
    "grad_norm": ("grad_norm", "{:8.4f}", "yellow"),
    "lr": ("lr", "{:.2e}", "magenta"),
    "tokens_per_second": ("tokens/s", "{:,.0f}", "blue"),
    "mfu": ("mfu", "{:.2f}%", "cyan"),
    "router/load_max_over_mean": ("expert load", "{:.2f}x", "cyan"),
    "memory_peak_gib": ("memory", "{:.2f}GiB", "dim"),
    "validation_loss": ("validation loss", "{:8.5f}", "green"),
    "validation_perplexity": ("perplexity", "{:.5g}", "green"),
}


class Sink(Protocol):
    """A place for rows."""

    def write(self, row: Row) -> None:
        """Take the figures of one logged step."""

    def close(self) -> None:
        """Make sure that everything has arrived; nothing is written afterwards."""


class JsonlSink:
    """Append rows to a file of JSON lines; a row survives a crash of this process at once.

    Rows of an earlier start beyond `resume_step` are dropped first: they are trained again. At 0
    none is gone on from, whether another training made them or a start that was killed before its
    first save, and they are kept beside it under a number. Raises
    DataError when the file holds something else than rows.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step == 0 and path.exists() and path.stat().st_size > 0:
            _set_aside(path)
        elif path.exists():
            kept = [row for row in read_rows(path) if row["step"] <= resume_step]
            _replace(path, lines=[json.dumps(row) for row in kept])
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append the row; raises DataError when the disk does not take it."""
        with _writing(self._file.name):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class ConsoleSink:
    """Log one line a row, for the console of the picked ranks and the log file of each."""

    def __init__(self, *, color: bool) -> None:
        self._color = color

    def write(self, row: Row) -> None:
        """Log the row; a figure that it lacks is left out, a missing loss is a dash, and told."""
        has_no_loss = "loss" in row and row["loss"] is None
        parts = [
            paint(f"{label}: {layout.format(row[name])}", style, color=self._color)
            for name, (label, layout, style) in _CONSOLE.items()
            if row.get(name) is not None
        ]
        if has_no_loss:
            parts.insert(1, paint(f"loss: {'-':>8}", "green", color=self._color))
        logger.info("  ".join(parts))
        if has_no_loss:
            logger.warning(
                "Step %d has no loss: none of its tokens has a label, so its gradients are zero",
                row["step"],
            )

    def close(self) -> None:
        """Do nothing: the log outlives the run."""


class TensorBoardSink:
    """Write event files; what an earlier start wrote beyond `resume_step` is hidden.

    `settings` are the job's, shown as a text. TensorBoard calls a run by its path below --logdir.
    """

    def __init__(self, folder: Path, *, resume_step: int, settings: Mapping[str, Any]) -> None:
        tensorboard = _load("torch.utils.tensorboard", setting="metrics.enable_tensorboard")
        self._folder = str(folder)
        # indented: Markdown leaves it as it is
        lines = (f"    {key} = {json.dumps(value)}\n" for key, value in _flat(settings))
        with _writing(self._folder):
            self._writer = tensorboard.SummaryWriter(
                self._folder, purge_step=resume_step + 1, flush_secs=10
            )
            self._writer.add_text("settings", "".join(lines), global_step=resume_step)

    def write(self, row: Row) -> None:
        """Write the row under torchtitan's tags.

        Raises DataError when the disk does not take it.
        """
        with _writing(self._folder):  # by a thread: what fails now is told with a later row
            for tag, value in tagged(row).items():
                self._writer.add_scalar(tag, value, global_step=int(row["step"]))

    def close(self) -> None:
        """Flush and close the event file."""
        with _writing(self._folder):
            self._writer.close()


class WandbSink:
    """Send rows to Weights & Biases, or with WANDB_MODE=offline to `folder/wandb` alone.

    The other variables of W&B hold too (WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_ID ...). `settings`
    are the job's, shown with the run. Raises ConfigError when W&B is missing or cannot start.
    """

    def __init__(self, folder: Path, *, name: str, settings: Mapping[str, Any]) -> None:
        wandb = _load("wandb", setting="metrics.enable_wandb")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan"),
                name=os.environ.get("WANDB_NAME", name),
                dir=str(folder),
                config=dict(settings),
                # our log already has every line, and the progress bar must not be captured
                settings=wandb.Settings(console="off", silent=True),
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"metrics.enable_wandb needs Weights & Biases to start, got: {error}; "
                f"run `wandb login`, or set WANDB_MODE=offline"
            ) from error
        logger.info("W&B files: %s", self._run.dir)

    def write(self, row: Row) -> None:
        """Send the row under torchtitan's tags."""
        self._run.log(tagged(row), step=int(row["step"]))

    def close(self) -> None:
        """Finish the run; waits until everything is sent."""
        self._run.finish()


def build_sinks(
    metrics: MetricsConfig,
    *,
    folder: Path,
    rank: int,
    resume_step: int,
    color: bool,
    job_config: Mapping[str, Any],
    description: str,
    sections: Mapping[str, object] = MappingProxyType({}),
) -> list[Sink]:
    """Return the sinks of this rank: files on rank 0, or on all ranks if asked; a console on each.

    `folder`: the run's. `job_config`: all settings as plain values. `sections`: the user's own.
    Raises ConfigError for an optional package that is missing, or a sink that is none.
    """
    sinks: list[Sink] = []
    everyone = metrics.save_for_all_ranks
    if rank == 0 or everyone:
        file = folder / (f"{RECORD}.rank_{rank}.jsonl" if rank else f"{RECORD}.jsonl")
        sinks.append(JsonlSink(file, resume_step=resume_step))
        if metrics.enable_tensorboard:
            # the run's own name once more: files right in tb/ would be a run named "tb" or "."
            tb_folder = folder / metrics.save_tb_folder / folder.resolve().name
            tb_folder = tb_folder / f"rank_{rank}" if everyone else tb_folder
            sinks.append(TensorBoardSink(tb_folder, resume_step=resume_step, settings=job_config))
        if metrics.enable_wandb:
            name = f"{description} rank {rank}" if everyone else description
            sinks.append(WandbSink(folder, name=name, settings=job_config))
        offered = {"folder": folder, "rank": rank, "resume_step": resume_step, **sections}
        sinks += [_build_own(path, offered) for path in metrics.sinks]
    return [*sinks, ConsoleSink(color=color)]


def _build_own(path: str, offered: Mapping[str, object]) -> Sink:
    sink: Sink = make(path, key="metrics.sinks", offered=offered)
    check_methods(sink, Sink, path=path, key="metrics.sinks")
    return sink


def tagged(row: Row) -> dict[str, float]:
    """Return the figures that a row has under torchtitan's tags, without its step."""
    figures = {
        TAGS.get(name, name): value
        for name, value in row.items()
        if name != "step" and value is not None and not isinstance(value, list)
    }
    if row.get("step_time_s"):
        figures["time_metrics/data_loading(%)"] = 100 * row["data_time_s"] / row["step_time_s"]
    return figures


def _flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting by its whole key: training.dataloader.num_workers."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@contextmanager
def _writing(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} must be writable all along, got: {error.strerror or error}; make room or mend "
            f"it, and start again, checkpoints are untouched"
        ) from error


def _set_aside(path: Path) -> None:
    """Give a file the first free of the names `metrics.1.jsonl`, `metrics.2.jsonl` ..."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    free = next(name for name in names if not name.exists())
    path.rename(free)
    logger.warning(
        "%s held rows of an earlier start, which is not gone on from; they are in %s now",
        path,
        free.name,
    )


def _replace(path: Path, *, lines: Sequence[str]) -> None:
    """Rewrite a file so that a crash leaves the old one or the new one."""
    beside = path.with_name(path.name + ".tmp")
    beside.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    os.replace(beside, path)


def _load(module: str, *, setting: str) -> ModuleType:
    """Import an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{setting} = true needs a package that cannot be imported ({error}); "
            f"install it with pip, or set {setting} to false"
        ) from error
