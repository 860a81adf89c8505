"""Sinks: destinations of the figures of logged steps.

A row is a flat dictionary of numbers. A value is None if it is undefined, or a list of numbers,
which only the file and custom sinks receive. A sink is any object with `write(row)` and `close()`.
`build_sinks` decides once which sinks exist, and the training loop writes each row to all of them.

`metrics.jsonl` is always written, with every digit: it is the record of the run that scripts and
tests read. TensorBoard and Weights & Biases (`trackers.py`) receive the same figures if they are
enabled.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from torchtitan.base.custom import convert_errors, instantiate
from torchtitan.base.errors import ConfigError
from torchtitan.metrics.console import ConsoleSink
from torchtitan.metrics.rows import RECORD, Row, convert_os_errors, read_rows

if TYPE_CHECKING:
    from torchtitan.metrics.settings import MetricsConfig

logger = logging.getLogger(__name__)


@runtime_checkable
class Sink(Protocol):
    """Protocol of a sink.

    A custom class is called with `folder`, `rank`, `resume_step` and the arguments of its table.
    """

    def write(self, row: Row) -> None:
        """Receive the figures of one logged step."""

    def close(self) -> None:
        """Flush; no row follows."""


class JsonlSink:
    """Append rows to a file of JSON lines. Each row is flushed, so it survives a crash.

    If training starts at step 0, existing rows are moved to `metrics.N.jsonl`. Otherwise rows after
    `resume_step` are removed, because their steps are trained again. Raises DataError if the file
    holds something other than rows, or cannot be written.
    """

    def __init__(self, path: Path, *, resume_step: int) -> None:
        with convert_os_errors(str(path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            if resume_step == 0 and path.exists() and path.stat().st_size > 0:
                _move_aside(path)
            elif path.exists():
                temporary = path.with_name(path.name + ".tmp")  # a crash leaves the old or the new
                with temporary.open("w", encoding="utf-8") as kept:
                    rows = (row for row in read_rows(path) if row["step"] <= resume_step)
                    kept.writelines(json.dumps(row) + "\n" for row in rows)
                os.replace(temporary, path)
            self._file = path.open("a", encoding="utf-8")

    def write(self, row: Row) -> None:
        """Append the row; raise DataError if the file cannot be written."""
        with convert_os_errors(self._file.name):
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


@dataclass(frozen=True)
class _CustomSink:
    """A sink of the user's code, whose errors are mistakes in `metrics.sinks`."""

    path: str
    sink: Sink

    def write(self, row: Row) -> None:
        with convert_errors(self.path, key="metrics.sinks"):
            self.sink.write(row)

    def close(self) -> None:
        with convert_errors(self.path, key="metrics.sinks"):
            self.sink.close()


def build_sinks(
    metrics: MetricsConfig,
    *,
    folder: Path,
    rank: int,
    resume_step: int,
    last_step: int,
    color: bool,
    job_config: Mapping[str, Any],
    description: str,
) -> list[Sink]:
    """Build the sinks of this rank: a console on every rank, files on rank 0 or on all ranks.

    `resume_step` is the step from which training resumes, `description` the name of the run in W&B.
    Raises ConfigError if an optional package is missing, or a custom sink lacks a method. Raises
    DataError if a file cannot be written.
    """
    sinks: list[Sink] = []
    all_ranks = metrics.save_for_all_ranks
    if rank == 0 or all_ranks:
        file = folder / (f"{RECORD}.rank_{rank}.jsonl" if rank else f"{RECORD}.jsonl")
        sinks.append(JsonlSink(file, resume_step=resume_step))
        if metrics.enable_tensorboard:
            from torchtitan.metrics.trackers import TensorBoardSink

            # TensorBoard names a run by its path below --logdir: repeat the run's name
            tb_folder = folder / metrics.save_tb_folder / folder.resolve().name
            tb_folder = tb_folder / f"rank_{rank}" if all_ranks else tb_folder
            sinks.append(TensorBoardSink(tb_folder, resume_step=resume_step, settings=job_config))
        if metrics.enable_wandb:
            from torchtitan.metrics.trackers import WandbSink

            name = f"{description} rank {rank}" if all_ranks else description
            sinks.append(WandbSink(folder, name=name, settings=job_config))
        fixed = {"folder": folder, "rank": rank, "resume_step": resume_step}
        for options in metrics.sinks:
            path, kwargs = options["path"], {k: v for k, v in options.items() if k != "path"}
            sink = instantiate(path, key="metrics.sinks", kwargs=fixed | kwargs)
            if not isinstance(sink, Sink):
                rule = f"'{path}' must have the methods write(row) and close()"
                raise ConfigError.at("metrics.sinks", rule)
            sinks.append(_CustomSink(path, sink))
    return [*sinks, ConsoleSink(last_step=last_step, color=color)]


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
