"""Compare the settings stored in a run's folder with those of the job that resumes it.

A run may be resumed on other hardware, with another log frequency or for more steps, and stays the
same run. With another seed or sequence length it is a different one. `IGNORED` lists the settings
that may differ, with the reason. All others count, so that a new key counts until somebody has
thought about it.
"""

from __future__ import annotations

import pathlib
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch.distributed as dist

from torchtitan.base.custom import source_hash
from torchtitan.base.errors import CheckpointError, ConfigError
from torchtitan.base.files import read_text
from torchtitan.checkpoint.steps import resolve_step
from torchtitan.checkpoint.storage import read_manifest
from torchtitan.config.load import build
from torchtitan.config.schema import Path, literal, values_of
from torchtitan.config.sources import Layer, Setting, flatten, parse, to_toml
from torchtitan.job import Config, find_own, foreign_names, watching_sections, with_stored_own
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.settings import HF

CONFIG_FILE = "config.toml"
"""The resolved settings in a run's folder."""
_ROUNDING = "changes only the order of additions, and so the rounding"

IGNORED: Mapping[Path, str] = {
    ("job",): "names and places",
    ("metrics",): "what is reported",
    ("profiling",): "what is recorded",
    ("checkpoint",): "what is saved",
    ("validation",): "what is measured",
    ("comm",): "how ranks wait for each other",
    ("elastic",): "what a run does when nodes are lost",
    ("parallelism",): _ROUNDING,
    ("activation_checkpoint",): "recomputes the same numbers",
    ("compile",): _ROUNDING,
    ("training", "dataloader"): "workers read the same samples in the same order",
    ("training", "dataset_cache"): "where the same tokens are stored",
    ("training", "steps"): "the length of the run; it counts through total_steps",
    ("training", "num_epochs"): "the length of the run, as training.steps",
    ("training", "enable_cpu_offload"): "where the same numbers are stored",
    ("training", "loss_chunks"): _ROUNDING,
    ("training", "gc_freq"): "when memory is freed",
    ("training", "callbacks"): "observers of the run",
    ("optimizer", "implementation"): _ROUNDING,
    ("router", "log_layers"): "what is reported",
    ("lora", "export_format"): "what is written at the end",
    ("debug", "deterministic"): _ROUNDING,
    ("debug", "deterministic_warn_only"): "what is warned of",
    ("debug", "log_sample_hashes"): "what is recorded",
}
"""Settings that may differ, and why. A section includes all of its keys except `COUNTS`."""
COUNTS: Mapping[Path, str] = {
    ("validation", "holdout_fraction"): "held-out documents are not trained on",
    ("checkpoint", "grow_vocab"): "beside an adapter it selects what is trained",
}
DATA_PLACES = {
    ("training", "dataset_path"),
    ("training", "dataset_mixture"),
    ("training", "chat_template"),
    ("model", "tokenizer_path"),
}
"""Settings that may differ where fingerprints of data, template and tokenizer are compared."""
TOTAL_STEPS = ("lr_scheduler", "total_steps")
WARMUP_STEPS = ("lr_scheduler", "warmup_steps")
WARMUP_RATIO = ("lr_scheduler", "warmup_ratio")
DECAY_END = ("lr_scheduler", "decay_end")
FLAVOR = ("model", "flavor")
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
        """Read settings that `to_toml` wrote, with the meaning that they had then.

        Args:
            file: Named in errors.

        Raises:
            ConfigError: The settings cannot be read.
        """
        try:
            layer = _with_old_meaning(flatten(parse(toml, origin=str(file)), origin=str(file)))
            # the version that stored them has checked them by its own rules
            tree, layer = with_stored_own(Config, layer, file=str(file))
            loaded = build(tree, [layer], foreign=foreign_names(), check_rules=False)
            return cls(config=loaded.checked(), dp=dp)
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


EARLIER_DEFAULTS: tuple[Path, ...] = (("training", "mixed_precision_param"), DECAY_END, FLAVOR)
"""Settings that differ although nobody changed them: with the machine, or with the version."""


def trajectory_differences(then: Job, now: Job, *, data_is_checked: bool = False) -> list[str]:
    """Return the settings that shape the training and differ, one line each.

    Args:
        data_is_checked: Whether a fingerprint of the data is compared elsewhere, so that their
            place does not matter.
    """
    before, after = _resolve(then), _resolve(now)
    observers = {
        n for job in (then, now) for n in watching_sections(job.config, is_watcher=_is_ignored)
    }
    if before[TOTAL_STEPS] == 0:  # nothing was trained yet
        before[TOTAL_STEPS], before[WARMUP_STEPS] = after[TOTAL_STEPS], after[WARMUP_STEPS]
    if then.global_batch and now.global_batch:
        # the resulting batch counts, not its microbatches
        for values, job in ((before, then), (after, now)):
            values[LOCAL_BATCH], values[GLOBAL_BATCH] = None, job.global_batch
    paths = [*after, *(path for path in before if path not in after)]
    remarks = _origins(now)
    for path in EARLIER_DEFAULTS:
        remarks[path] = f" (to resume as before write it: {path[1]} = {literal(before.get(path))})"
    return [
        f"{'.'.join(path)}: stored {literal(before.get(path))}, now {literal(after.get(path))}"
        + remarks.get(path, "")
        for path in paths
        if before.get(path) != after.get(path)
        and not _is_ignored(path)
        and path[0] not in observers
        and not (data_is_checked and path in DATA_PLACES)
    ]


def _origins(job: Job) -> dict[Path, str]:
    """Return where values come from that a job derives from keys with other names."""
    training, schedule = job.config.training, job.config.lr_scheduler
    found: dict[Path, str] = {}
    if schedule.total_steps is None:
        key = "steps" if training.num_epochs is None else "num_epochs"
        found[TOTAL_STEPS] = f" (from training.{key})"
    if schedule.warmup_ratio is not None:
        found[WARMUP_STEPS] = f" (from warmup_ratio {schedule.warmup_ratio:g})"
    if training.global_batch_size == -1 and job.dp:
        found[GLOBAL_BATCH] = f" ({training.local_batch_size} on each of {job.dp} ranks)"
    return found


def shaping_code(config: Config) -> dict[str, str]:
    """Return the source hash of each custom module that shapes the training."""
    return {
        text: source_hash(text, key=".".join(path))
        for path, text in find_own(config)
        if not _is_ignored(path)
    }


def _with_old_meaning(stored: Layer) -> Layer:
    """Translate settings of versions without decay_end.

    Their decay ended at the last step, and their debugmodel is today's `small`. Every version
    stores all settings that it has.
    """
    if DECAY_END in stored:
        return stored
    end = Setting("last_step", "stored settings", DECAY_END, '"last_step"')
    translated = stored | {DECAY_END: end}
    if FLAVOR in stored and stored[FLAVOR].value == "debugmodel":
        translated[FLAVOR] = replace(stored[FLAVOR], value="small", given='"small"')
    return translated


def _is_ignored(path: Path) -> bool:
    return path not in COUNTS and any(path[:end] in IGNORED for end in range(1, len(path) + 1))


def _resolve(job: Job) -> dict[Path, object]:
    """Return the values of all settings, with those filled in that follow from others."""
    config, values = job.config, values_of(job.config)
    schedule = config.lr_scheduler
    total = schedule.total_steps or config.training.steps
    return values | {
        TOTAL_STEPS: total,
        WARMUP_STEPS: schedule.num_warmup_steps(total),
        WARMUP_RATIO: None,
        ("checkpoint", "grow_vocab"): config.lora.rank > 0 and config.checkpoint.grow_vocab,
    }


def resolve_model(config: Config) -> Config:
    """Return the settings with family and sizes of the Hugging Face folder that names the model.

    The run stores them, so the folder is not needed again: once it is gone, those of the run count.

    Raises:
        UserError: The folder does not exist, or its model is not built here.
    """
    if config.model.flavor != HF or not config.checkpoint.initial_load_in_hf:
        return config
    from torchtitan.hf.names import CONFIG
    from torchtitan.hf.source import names_all_sizes, read_model, with_model_of

    if names_all_sizes(config.model):
        return config
    folder, run = config.checkpoint.initial_load_path, config.job.dump_folder
    assert folder is not None, "initial_load_in_hf needs initial_load_path"
    stored = pathlib.Path(run) / CONFIG_FILE
    if not (pathlib.Path(folder) / CONFIG).is_file() and stored.is_file():
        found = Job.stored_in(stored).config.model
    else:
        found = read_model(pathlib.Path(folder), config.model)
    return replace(config, model=with_model_of(found, config.model))


def write_config(config: Config) -> None:
    """Write the resolved settings into the run's folder, from rank 0.

    Raises:
        CheckpointError: A file cannot be written.
    """

    def write() -> None:
        for name in filter(None, (CONFIG_FILE, config.job.save_config_file)):
            path = pathlib.Path(config.job.dump_folder) / name
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(to_toml(config), encoding="utf-8")
            except OSError as error:
                raise CheckpointError(
                    f"the settings must be written to a file in job.dump_folder, got {path}, which "
                    f"cannot be written: {error.strerror}; move away what is there, or choose "
                    f"another job.save_config_file or job.dump_folder"
                ) from error

    on_first_rank(write, group=dist.group.WORLD)


def find_run_step(
    path: pathlib.Path, *, verify: bool, group: dist.ProcessGroup | None = None
) -> pathlib.Path:
    """Return the checkpoint that a run, a folder of checkpoints or a step means.

    Raises:
        CheckpointError: There is none with stored settings, or the one that was named is damaged.
    """
    from torchtitan.hf.names import ADAPTER_CONFIG

    if (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{path} holds a LoRA adapter without the model: name the step of the run that trained "
            f'it, or let that run export with lora.export_format = "merged"'
        )
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
    manifest = read_manifest(step)
    return Job.stored(manifest["config"], file=manifest.path).config
