"""TensorBoard and Weights & Biases: sinks that show the figures of runs side by side.

Both receive the same figures under torchtitan 0.2's tags.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import textwrap
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from torchtitan.base.errors import ConfigError
from torchtitan.metrics.rows import Row, convert_os_errors

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
"""torchtitan 0.2's tags, so that runs of both can be plotted together. Other figures keep their
names."""


class TensorBoardSink:
    """Write event files. Events of an earlier start after `resume_step` are hidden.

    The job's settings are shown as text.
    """

    def __init__(self, folder: Path, *, resume_step: int, settings: Mapping[str, Any]) -> None:
        tensorboard = _import("torch.utils.tensorboard", key="metrics.enable_tensorboard")
        self._folder = str(folder)
        # indented, so that Markdown shows the lines as code
        text = textwrap.indent(json.dumps(settings, indent=2), "    ")
        with convert_os_errors(self._folder):
            self._writer = tensorboard.SummaryWriter(
                self._folder, purge_step=resume_step + 1, flush_secs=10
            )
            self._writer.add_text("settings", text, global_step=resume_step)

    def write(self, row: Row) -> None:
        """Write the row under torchtitan 0.2's tags; raise DataError if an earlier row could not be
        written; a thread writes in the background."""
        with convert_os_errors(self._folder):
            for tag, value in tagged(row).items():
                self._writer.add_scalar(tag, value, global_step=int(row["step"]))

    def close(self) -> None:
        """Flush and close the event file."""
        with convert_os_errors(self._folder):
            self._writer.close()


class WandbSink:
    """Send rows to Weights & Biases, or to `folder/wandb` if WANDB_MODE=offline.

    The variables of W&B apply (WANDB_PROJECT, WANDB_ENTITY, WANDB_RUN_ID, ...).

    WANDB_NAME takes precedence over `name`. Raises ConfigError if W&B is not installed or cannot
    start.
    """

    def __init__(self, folder: Path, *, name: str, settings: Mapping[str, Any]) -> None:
        wandb = _import("wandb", key="metrics.enable_wandb")
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
        """Send the row under torchtitan 0.2's tags."""
        self._run.log(tagged(row), step=int(row["step"]))

    def close(self) -> None:
        """Wait until everything is sent, and finish the run."""
        self._run.finish()


def tagged(row: Row) -> dict[str, float]:
    """Return the figures of a row under torchtitan 0.2's tags, without step, lists and None."""
    figures = {
        TAGS.get(name, name): value
        for name, value in row.items()
        if name != "step" and value is not None and not isinstance(value, list)
    }
    if row.get("step_time_s"):
        figures["time_metrics/data_loading(%)"] = 100 * row["data_time_s"] / row["step_time_s"]
    return figures


def _import(module: str, *, key: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError.at(key, f"needs a package: {error}; install it with pip") from error
