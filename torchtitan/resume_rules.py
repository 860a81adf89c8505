"""Compare the settings stored in a run's folder with those of the job that resumes it.

A run may be resumed on other hardware, with another log frequency or for more steps, and stays the
same run. With another seed or sequence length it is a different one. `IGNORED` lists the settings
that may differ, with the reason. All others count, so that a new key counts until somebody has
thought about it.
"""

from __future__ import annotations

import logging
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import torch.distributed as dist

from torchtitan.base.custom import mark_stored
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.base.files import StoredJSON, read_text
from torchtitan.checkpoint.source import Checkpoint
from torchtitan.checkpoint.start import Comparison, resolve_step, stored_layout
from torchtitan.config.old_names import OLD_NAMES
from torchtitan.config.settings import (
    Path,
    build,
    flatten,
    literal,
    parse,
    values_of,
)
from torchtitan.job import CONFIG_FILE, Config
from torchtitan.models.families import find_model, to_settings
from torchtitan.models.settings import HF, TRANSFORMERS
from torchtitan.optim.schedule import build_schedule

logger = logging.getLogger(__name__)
_ROUNDING = "changes only the order of additions, and so the rounding"

IGNORED: Mapping[Path, str] = {
    ("job",): "names and places",
    ("metrics",): "what is reported",
    ("profiling",): "what is recorded",
    ("checkpoint",): "what is saved",
    ("validation",): "what is measured",
    ("comm",): "how ranks wait for each other",
    ("parallelism",): _ROUNDING,
    ("activation_checkpoint",): "recomputes the same numbers",
    ("compile",): _ROUNDING,
    ("training", "dataloader"): "workers read the same samples in the same order",
    ("training", "dataset_cache"): "where the same tokens are stored",
    ("training", "steps"): "the length of the run; it counts through total_steps",
    ("training", "num_epochs"): "the length of the run, as training.steps",
    ("training", "enable_cpu_offload"): "where the same numbers are stored",
    ("training", "loss_chunks"): _ROUNDING,
    ("training", "attention_kernel"): _ROUNDING,
    ("training", "gc_freq"): "when memory is freed",
    ("training", "callbacks"): "observers of the run",
    ("optimizer", "implementation"): _ROUNDING,
    ("router", "log_layers"): "what is reported",
    ("lora", "export_format"): "what is written at the end",
    ("debug", "deterministic"): _ROUNDING,
    ("debug", "deterministic_warn_only"): "what is warned of",
}
"""Settings that may differ, and why. A section includes all of its keys except `COUNTS`."""
COUNTS: Mapping[Path, str] = {
    ("validation", "holdout_fraction"): "held-out documents are not trained on",
}
DATA_PLACES = {
    ("training", "dataset_path"),
    ("training", "chat_template"),
    ("model", "tokenizer_path"),
}
"""Settings that may differ where fingerprints of data, template and tokenizer are compared."""
TOTAL_STEPS = ("lr_scheduler", "total_steps")
WARMUP_STEPS = ("lr_scheduler", "warmup_steps")
WARMUP_RATIO = ("lr_scheduler", "warmup_ratio")
PRECISION = ("training", "mixed_precision_param")
LOCAL_BATCH = ("training", "local_batch_size")
GLOBAL_BATCH = ("training", "global_batch_size")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a job, and its number of data-parallel ranks if that is known."""

    config: Config
    dp: int | None = None

    @classmethod
    def stored(
        cls, toml: str, *, file: pathlib.Path | str = "stored settings", dp: int | None = None
    ) -> Job:
        """Read settings that `to_toml` wrote; raise ConfigError if the settings cannot be read."""
        try:
            table = mark_stored(parse(toml, origin=str(file)), file=str(file))
            layer = flatten(table, origin=str(file), tree=Config)
            # the version that stored them has checked them by its own rules
            loaded, mistakes = build(Config, [layer], old_names=OLD_NAMES, check_rules=False)
            if mistakes:
                raise ConfigError(mistakes)
            return cls(config=loaded.config, dp=dp)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; restore {file}, or use the version that wrote it"
            ) from error

    @classmethod
    def stored_in(cls, file: pathlib.Path) -> Job:
        """Read a file of such settings; raises ConfigError if it cannot be read."""
        try:
            toml = read_text(file)
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}, the settings of a run, cannot be read: {error}") from error
        return cls.stored(toml, file=file)

    @property
    def global_batch(self) -> int | None:
        """Samples per step; None if they depend on an unknown number of ranks."""
        training = self.config.training
        if training.global_batch_size != -1:
            return training.global_batch_size
        return None if self.dp is None else training.local_batch_size * self.dp


def trajectory_differences(then: Job, now: Job, *, data_is_checked: bool = False) -> list[str]:
    """Return the settings that shape the training and differ, one line each.

    `data_is_checked` says that a fingerprint of the data is compared elsewhere, so that their place
    does not matter.
    """
    before, after = _resolve(then), _resolve(now)
    if before[TOTAL_STEPS] == 0:  # nothing was trained yet
        before[TOTAL_STEPS], before[WARMUP_STEPS] = after[TOTAL_STEPS], after[WARMUP_STEPS]
    if then.global_batch and now.global_batch:
        # the resulting batch counts, not its microbatches
        for values, job in ((before, then), (after, now)):
            values[LOCAL_BATCH], values[GLOBAL_BATCH] = None, job.global_batch
    paths = [*after, *(path for path in before if path not in after)]
    remarks = _origins(now)
    # "auto" may mean another type on this machine
    remarks[PRECISION] = (
        f" (to resume as before write {PRECISION[1]} = {literal(before[PRECISION])})"
    )
    return [
        f"{'.'.join(path)}: stored {literal(before.get(path))}, now {literal(after.get(path))}"
        + remarks.get(path, "")
        for path in paths
        if before.get(path) != after.get(path)
        and not _is_ignored(path)
        and not (data_is_checked and path in DATA_PLACES)
    ]


def compare_with_checkpoint(manifest: StoredJSON, now: Job) -> Comparison:
    """Compare a job with the job of a checkpoint. Fingerprints of data are compared elsewhere."""
    then = Job.stored(manifest["config"], file=manifest.path, dp=stored_layout(manifest).dp)
    differences = trajectory_differences(then, now, data_is_checked=True)
    if differences:
        differences += _next_rates(then, now, step=manifest["step"] + 1)
    before, after = then.config.training, now.config.training
    limits = [
        (inf if steps == -1 else steps, inf if num_epochs is None else num_epochs)
        for steps, num_epochs in ((t.steps, t.num_epochs) for t in (before, after))
    ]
    (old_steps, old_epochs), (steps, num_epochs) = limits
    has_more = steps > manifest["step"] and (steps > old_steps or num_epochs > old_epochs)
    lengths: dict[str, Any] = {"steps": after.steps, "num_epochs": after.num_epochs}
    longer = replace(then.config, training=replace(before, **lengths))
    return Comparison(
        differences=tuple(differences),
        then=then.config.checkpoint,
        is_longer=manifest["step"] == manifest.get("last_step")
        and has_more
        and not trajectory_differences(replace(then, config=longer), now, data_is_checked=True),
    )


def _next_rates(then: Job, now: Job, *, step: int) -> list[str]:
    """Return a line about the learning rate of a step, if it is known and differs."""
    rates = [
        build_schedule(c.lr_scheduler, peak_lr=c.optimizer.lr, training_steps=c.training.steps)(
            step
        )
        for c in (then.config, now.config)
        if c.lr_scheduler.total_steps or c.training.num_epochs is None
    ]
    if len(rates) < 2 or rates[0] == rates[1]:
        return []
    return [f"learning rate of step {step}: stored {rates[0]:.2e}, now {rates[1]:.2e}"]


def compare_with_results(now: Job) -> tuple[str, ...]:
    """Return the settings that differ from those in the run's folder."""
    stored = pathlib.Path(now.config.job.dump_folder) / CONFIG_FILE
    return tuple(trajectory_differences(Job.stored_in(stored), now)) if stored.is_file() else ()


def _origins(job: Job) -> dict[Path, str]:
    """Return where values come from that a job derives from keys with other names."""
    training, schedule = job.config.training, job.config.lr_scheduler
    origins: dict[Path, str] = {}
    if schedule.total_steps is None:
        key = "steps" if training.num_epochs is None else "num_epochs"
        origins[TOTAL_STEPS] = f" (from training.{key})"
    if schedule.warmup_ratio is not None:
        origins[WARMUP_STEPS] = f" (from warmup_ratio {schedule.warmup_ratio:g})"
    if training.global_batch_size == -1 and job.dp:
        origins[GLOBAL_BATCH] = f" ({training.local_batch_size} on each of {job.dp} ranks)"
    return origins


def _is_ignored(path: Path) -> bool:
    return path not in COUNTS and any(path[:end] in IGNORED for end in range(1, len(path) + 1))


def _resolve(job: Job) -> dict[Path, object]:
    """Return the values of all settings, with those filled in that follow from others."""
    config, values = job.config, values_of(job.config)
    schedule, training = config.lr_scheduler, config.training
    total = schedule.total_steps
    if total is None and training.num_epochs is not None:  # the number of steps depends on the data
        limit = "" if training.steps == -1 else f", at most {training.steps} steps"
        return values | {TOTAL_STEPS: f"{training.num_epochs} epochs{limit}"}
    total = total or training.steps
    warmup = schedule.num_warmup_steps(total)
    return values | {TOTAL_STEPS: total, WARMUP_STEPS: warmup, WARMUP_RATIO: None}


def resolve_model(config: Config) -> Config:
    """Return the settings with family and sizes of the Hugging Face folder that names the model.

    The run stores them, so the folder is not needed again: once it is gone, those of the run count.
    Raises UserError if the folder does not exist, or its model is not built here.
    """
    path = config.checkpoint.initial_load_path
    is_flavor = config.model.name == TRANSFORMERS and config.model.flavor != HF
    if not is_flavor and (not config.checkpoint.initial_load_in_hf or path is None):
        return config
    from torchtitan.hf.model import find_export, names_all_sizes, read_model, with_model_of
    from torchtitan.hf.names import CONFIG

    if is_flavor:
        model = to_settings(*find_model(config.model))
        return replace(config, model=with_model_of(model, config.model))
    assert path is not None
    from torchtitan.hf.hub import download, is_name

    folder, run = find_export(pathlib.Path(path)), config.job.dump_folder
    if is_name(path):
        folder = download(path, key="checkpoint.initial_load_path")
        if config.model.tokenizer_path == path:
            config = replace(config, model=replace(config.model, tokenizer_path=str(folder)))
    initial = replace(config.checkpoint, initial_load_path=str(folder))
    config = replace(config, checkpoint=initial)
    if config.model.flavor != HF or names_all_sizes(config.model):
        return config
    stored = pathlib.Path(run) / CONFIG_FILE
    if not (folder / CONFIG).is_file() and stored.is_file():
        model = Job.stored_in(stored).config.model
        if model.name == config.model.name:  # the user names the same family
            model = replace(model, name=config.model.name)
    else:
        model = read_model(folder, config.model)
    return replace(config, model=with_model_of(model, config.model))


def find_run_step(
    path: pathlib.Path, *, verify: bool, group: dist.ProcessGroup | None = None
) -> pathlib.Path:
    """Return the checkpoint that a run, a folder of checkpoints or a step means; raise
    CheckpointError if there is none with stored settings, or the one that was named is damaged."""
    from torchtitan.hf.config import refuse_adapter

    refuse_adapter(path)
    stored, subfolder = path / CONFIG_FILE, "checkpoint"
    if stored.is_file():
        subfolder = Job.stored_in(stored).config.checkpoint.local_folder
    step, is_ours = resolve_step(path, subfolder=subfolder, verifies=verify, group=group)
    if not is_ours:
        raise CheckpointError(
            f"{step} holds weights without the settings of a run; name a step that this library "
            f"saved, or a Hugging Face folder"
        )
    return step


def read_settings(step: pathlib.Path) -> Config:
    """Return the settings in the manifest of a checkpoint."""
    manifest = Checkpoint(path=step, group=None).manifest
    return Job.stored(manifest["config"], file=manifest.path).config
