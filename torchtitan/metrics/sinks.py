"""Sinks: destinations of the figures of logged steps.

A row is a flat dictionary of numbers. A value is None if it is undefined, or a list of numbers,
which only the file and custom sinks receive. A sink is any object with `write(row)` and `close()`.
`build_sinks` decides once which sinks exist, and the training loop writes each row to all of them.

`metrics.jsonl` is always written, with every digit: it is the record of the run that scripts and
tests read. TensorBoard and Weights & Biases receive the same figures under torchtitan's tags; their
packages are imported only if they are enabled.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from torchtitan.base.custom import check_methods, instantiate
from torchtitan.base.errors import ConfigError, DataError
from torchtitan.metrics.console import ConsoleSink
from torchtitan.metrics.rows import RECORD, Row, read_rows

if TYPE_CHECKING:
    from torchtitan.metrics.settings import MetricsConfig

logger = logging.getLogger(__name__)

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
"""torchtitan's tags, so that runs of both can be plotted together. Other figures keep their
names."""


class Sink(Protocol):
    """Protocol of a sink."""

    def write(self, row: Row) -> None:
        """Receive the figures of one logged step."""

    def close(self) -> None:
        """Flush; no row follows."""


class JsonlSink:
    """Append rows to a file of JSON lines. Each row is flushed, so it survives a crash.

    If training starts at step 0, existing rows are moved to `metrics.N.jsonl`. Otherwise rows
    after `resume_step` are removed, because their steps are trained again.

    Raises:
        DataError: The file holds something other than rows.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        if resume_step == 0 and path.exists() and path.stat().st_size > 0:
            _move_aside(path)
        elif path.exists():
            kept = [row for row in read_rows(path) if row["step"] <= resume_step]
            temporary = path.with_name(path.name + ".tmp")  # a crash leaves the old file or the new
            temporary.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
            os.replace(temporary, path)
        self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append the row.

        Raises:
            DataError: The file cannot be written.
        """
        with _convert_os_errors(self._file.name):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class TensorBoardSink:
    """Write event files. Events of an earlier start after `resume_step` are hidden.

    Args:
        folder: Folder of the event files.
        resume_step: Step from which training resumes.
        settings: The job's settings, shown as text.
    """

    def __init__(self, folder: Path, *, resume_step: int, settings: Mapping[str, Any]) -> None:
        tensorboard = _import_package(
            "torch.utils.tensorboard", setting="metrics.enable_tensorboard"
        )
        self._folder = str(folder)
        # indented, so that Markdown shows the lines as code
        lines = (f"    {key} = {json.dumps(value)}\n" for key, value in _flatten(settings))
        with _convert_os_errors(self._folder):
            self._writer = tensorboard.SummaryWriter(
                self._folder, purge_step=resume_step + 1, flush_secs=10
            )
            self._writer.add_text("settings", "".join(lines), global_step=resume_step)

    def write(self, row: Row) -> None:
        """Write the row under torchtitan's tags.

        Raises:
            DataError: An earlier row could not be written; a thread writes in the background.
        """
        with _convert_os_errors(self._folder):
            for tag, value in tagged(row).items():
                self._writer.add_scalar(tag, value, global_step=int(row["step"]))

    def close(self) -> None:
        """Flush and close the event file."""
        with _convert_os_errors(self._folder):
            self._writer.close()


class WandbSink:
    """Send rows to Weights & Biases, or to `folder/wandb` if WANDB_MODE=offline.

    The variables of W&B apply (WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_ID, ...).

    Args:
        folder: Parent of W&B's folder.
        name: Name of the run; WANDB_NAME takes precedence.
        settings: The job's settings, shown with the run.

    Raises:
        ConfigError: W&B is not installed or cannot start.
    """

    def __init__(self, folder: Path, *, name: str, settings: Mapping[str, Any]) -> None:
        wandb = _import_package("wandb", setting="metrics.enable_wandb")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = wandb.init(
                project=os.environ.get("WANDB_PROJECT", "torchtitan"),
                name=os.environ.get("WANDB_NAME", name),
                dir=str(folder),
                config=dict(settings),
                # the log files have every line, and the progress bar must not be captured
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
        """Wait until everything is sent, and finish the run."""
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
    """Build the sinks of this rank: a console on every rank, files on rank 0 or on all ranks.

    Args:
        metrics: The section [metrics].
        folder: Folder of the run.
        rank: This rank.
        resume_step: Step from which training resumes.
        color: Use colors on the console.
        job_config: All settings as plain values.
        description: Name of the run in W&B.
        sections: Custom sections, offered to custom sinks.

    Raises:
        ConfigError: An optional package is missing, or a custom sink lacks a method.
        DataError: A file cannot be written.
    """
    sinks: list[Sink] = []
    all_ranks = metrics.save_for_all_ranks
    if rank == 0 or all_ranks:
        file = folder / (f"{RECORD}.rank_{rank}.jsonl" if rank else f"{RECORD}.jsonl")
        sinks.append(JsonlSink(file, resume_step=resume_step))
        if metrics.enable_tensorboard:
            # TensorBoard names a run by its path below --logdir: repeat the run's name
            tb_folder = folder / metrics.save_tb_folder / folder.resolve().name
            tb_folder = tb_folder / f"rank_{rank}" if all_ranks else tb_folder
            sinks.append(TensorBoardSink(tb_folder, resume_step=resume_step, settings=job_config))
        if metrics.enable_wandb:
            name = f"{description} rank {rank}" if all_ranks else description
            sinks.append(WandbSink(folder, name=name, settings=job_config))
        kwargs = {"folder": folder, "rank": rank, "resume_step": resume_step, **sections}
        for path in metrics.sinks:
            sink: Sink = instantiate(path, key="metrics.sinks", kwargs=kwargs)
            check_methods(sink, Sink, path=path, key="metrics.sinks")
            sinks.append(sink)
    return [*sinks, ConsoleSink(color=color)]


def tagged(row: Row) -> dict[str, float]:
    """Return the figures of a row under torchtitan's tags, without step, lists and None."""
    figures = {
        TAGS.get(name, name): value
        for name, value in row.items()
        if name != "step" and value is not None and not isinstance(value, list)
    }
    if row.get("step_time_s"):
        figures["time_metrics/data_loading(%)"] = 100 * row["data_time_s"] / row["step_time_s"]
    return figures


def _flatten(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield each setting with its dotted key, e.g. training.dataloader.num_workers."""
    for key, value in settings.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


@contextmanager
def _convert_os_errors(path: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataError(
            f"{path} cannot be written: {error.strerror or error}; make room and run the same "
            f"command to resume"
        ) from error


def _move_aside(path: Path) -> None:
    """Rename a file to the first unused name of `metrics.1.jsonl`, `metrics.2.jsonl`, ..."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    unused = next(name for name in names if not name.exists())
    path.rename(unused)
    logger.warning(
        "%s had rows of an earlier run; they were moved to %s, because training starts at step 0",
        path,
        unused.name,
    )


def _import_package(module: str, *, setting: str) -> ModuleType:
    """Import an optional package."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(
            f"{setting} = true needs a package that cannot be imported ({error}); "
            f"install it with pip, or set {setting} to false"
        ) from error
