"""Tell whether two jobs train the same thing: what a folder's stored settings are compared with.

A run may be resumed on other hardware, with another log frequency or for more steps, and stays the
same run; with another seed or sequence length it is a different one. The table below lists what
does not count, with the reason; everything else does, so that a new key counts until somebody has
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
from torchtitan.config.fields import values_of
from torchtitan.config.layers import Layer, Path, Setting, flatten, literal
from torchtitan.config.load import build
from torchtitan.config.toml_files import parse, to_toml
from torchtitan.job import Config, find_own, torchtitans_keys, watching_sections, with_stored_own
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.settings import HF

CONFIG_FILE = "config.toml"
"""The resolved settings in a run's folder."""
_ROUNDING = "changes the order of additions alone: the same training to rounding"

# A section stands for all of its keys, but for those below.
IGNORED: Mapping[Path, str] = {
    ("job",): "names and places",
    ("metrics",): "what is shown",
    ("profiling",): "what is recorded",
    ("checkpoint",): "what is saved",
    ("validation",): "what is measured",
    ("comm",): "how ranks wait for one another",
    ("elastic",): "what a run does when nodes are lost",
    ("parallelism",): _ROUNDING,
    ("activation_checkpoint",): "recomputes the same numbers",
    ("compile",): _ROUNDING,
    ("training", "dataloader"): "workers read the same samples in the same order",
    ("training", "dataset_cache"): "where the same tokens are kept",
    ("training", "steps"): "how far along the same curve; it counts through total_steps",
    ("training", "num_epochs"): "when the same order of samples ends; as training.steps",
    ("training", "enable_cpu_offload"): "where the same numbers are kept",
    ("training", "loss_chunks"): _ROUNDING,
    ("training", "gc_freq"): "when memory is tidied up",
    ("training", "callbacks"): "what follows the run",
    ("optimizer", "implementation"): _ROUNDING,
    ("router", "log_layers"): "what is shown",
    ("lora", "export_format"): "what is written at the end",
    ("debug", "deterministic"): _ROUNDING,
    ("debug", "deterministic_warn_only"): "what is warned of",
    ("debug", "log_sample_hashes"): "what is written down",
}

COUNTS: Mapping[Path, str] = {
    ("validation", "holdout_fraction"): "what is held out is not trained on",
}

TOTAL_STEPS = ("lr_scheduler", "total_steps")
WARMUP_STEPS = ("lr_scheduler", "warmup_steps")
WARMUP_RATIO = ("lr_scheduler", "warmup_ratio")
DECAY_END = ("lr_scheduler", "decay_end")
FLAVOR = ("model", "flavor")
LOCAL_BATCH = ("training", "local_batch_size")
GLOBAL_BATCH = ("training", "global_batch_size")
PRECISION = ("training", "mixed_precision_param")


@dataclass(frozen=True, kw_only=True)
class Job:
    """The settings of a job, and the data-parallel ranks it runs on where that is known."""

    config: Config
    dp: int | None = None

    @classmethod
    def stored(
        cls, toml: str, *, file: pathlib.Path | str = "stored settings", dp: int | None = None
    ) -> Job:
        """Read back what `to_toml` once wrote, with the meaning that it had then; raise ConfigError
        if that is not possible. `file` is named in the message."""
        try:
            layer = _as_meant_then(flatten(parse(toml, origin=str(file)), origin=str(file)))
            # the version that stored them has checked them by its own rules
            tree, layer = with_stored_own(Config, layer, file=str(file))
            loaded = build(tree, [layer], foreign=torchtitans_keys(), check_rules=False)
            return cls(config=loaded.checked(), dp=dp)
        except ConfigError as error:
            raise ConfigError(
                f"{error}; restore {file}, or use the version that wrote it"
            ) from error

    @classmethod
    def stored_in(cls, file: pathlib.Path) -> Job:
        """Read back a file of such settings; raise ConfigError if that is not possible."""
        try:
            toml = read_text(file)
        except (OSError, ValueError) as error:
            raise ConfigError(
                f"{file} must hold the settings of a run, it cannot be read: {error}; restore it"
            ) from error
        return cls.stored(toml, file=file)

    @property
    def global_batch(self) -> int | None:
        """Samples of a step; None where they depend on an unknown number of ranks."""
        training = self.config.training
        if training.global_batch_size != -1:
            return training.global_batch_size
        return None if self.dp is None else training.local_batch_size * self.dp


def _as_meant_then(stored: Layer) -> Layer:
    """Give stored settings the meaning that they had in the version that stored them.

    A version stores every setting it has. One without decay_end let the decay end at the last step,
    and its debugmodel is `small` today.
    """
    if DECAY_END in stored:
        return stored
    meant = stored | {DECAY_END: Setting("last_step", "stored settings", DECAY_END, '"last_step"')}
    if FLAVOR in stored and stored[FLAVOR].value == "debugmodel":
        meant[FLAVOR] = replace(stored[FLAVOR], value="small", given='"small"')
    return meant


PLACES_OF_DATA = {
    ("training", "dataset_path"),
    ("training", "dataset_mixture"),
    ("training", "chat_template"),
    ("model", "tokenizer_path"),
}
"""Say nothing where a fingerprint of data and weights, template and tokenizer is compared."""


def trajectory_differences(then: Job, now: Job, *, data_is_checked: bool = False) -> list[str]:
    """Say which settings that shape the training differ, one line each.

    `data_is_checked`: the data's fingerprint is compared elsewhere, and where they lie is no
    matter.
    """
    before, after = _resolved(then), _resolved(now)
    watching = {
        name
        for job in (then, now)
        for name in watching_sections(job.config, is_watcher=_is_ignored)
    }
    for path in before.keys() ^ after.keys():  # of the user's own
        before.setdefault(path, None)
        after.setdefault(path, None)
    if before[TOTAL_STEPS] == 0:  # nothing was trained yet
        before[TOTAL_STEPS], before[WARMUP_STEPS] = after[TOTAL_STEPS], after[WARMUP_STEPS]
    if then.global_batch and now.global_batch:
        # what counts is the batch that results: cut into other microbatches it is the same one
        for values, job in ((before, then), (after, now)):
            values[LOCAL_BATCH], values[GLOBAL_BATCH] = None, job.global_batch
    remarks: dict[Path, str] = {
        TOTAL_STEPS: _describe_total(then.config, now.config),
        GLOBAL_BATCH: f" ({now.config.training.local_batch_size} on each of {now.dp} ranks)"
        if now.config.training.global_batch_size == -1 and now.dp
        else "",
        WARMUP_STEPS: f" (warmup_ratio {now.config.lr_scheduler.warmup_ratio:g} of total_steps)"
        if now.config.lr_scheduler.warmup_ratio is not None
        else "",
        # "auto" may have come to another type here; the others may have had another meaning then
        **{
            path: f" (to go on as before write it: {path[1]} = {literal(before[path])})"
            for path in (PRECISION, DECAY_END, FLAVOR)
        },
    }
    return [
        f"{'.'.join(path)}: stored {literal(before[path])}, now {literal(after[path])}"
        + remarks.get(path, "")
        for path in after
        if before[path] != after[path]
        and not _is_ignored(path)
        and path[0] not in watching
        and not (data_is_checked and path in PLACES_OF_DATA)
    ]


def shaping_code(config: Config) -> dict[str, str]:
    """Return the hash of the source behind each import path that shapes the training."""
    return {
        text: source_hash(text, key=".".join(path))
        for path, text in find_own(config)
        if not _is_ignored(path)
    }


def _describe_total(then: Config, now: Config) -> str:
    """Say where the length of a schedule comes from, if it is not given."""
    if now.lr_scheduler.total_steps is not None:
        return ""
    epochs = now.training.num_epochs
    if epochs is None or epochs != then.training.num_epochs:
        key = "steps" if epochs is None else "num_epochs"
        return f" (as training.{key}: total_steps is not given)"
    # earlier versions planned over training.steps, wherever the data end
    total = then.lr_scheduler.total_steps or then.training.steps
    return f" (as training.num_epochs; to go on as before write it: total_steps = {total})"


def _is_ignored(path: Path) -> bool:
    return path not in COUNTS and any(path[:end] in IGNORED for end in range(1, len(path) + 1))


def _resolved(job: Job) -> dict[Path, object]:
    """Lay the settings out flat, those that follow from others filled in."""
    values = values_of(job.config)
    schedule = job.config.lr_scheduler
    total = schedule.total_steps or job.config.training.steps
    values |= {TOTAL_STEPS: total, WARMUP_STEPS: schedule.num_warmup_steps(total)}
    values[WARMUP_RATIO] = None
    return values


def resolve_model(config: Config) -> Config:
    """Return the settings with family and sizes of the Hugging Face folder that names the model.

    The run stores them, so the folder is not needed again: once it is gone, those of the run count.

    Raises:
        UserError: The folder does not exist, or its model is not built here.
    """
    if config.model.flavor != HF or not config.checkpoint.initial_load_in_hf:
        return config
    from torchtitan.hf.source import is_hf_folder, names_all_sizes, read_model, with_model_of

    if names_all_sizes(config.model):
        return config
    folder, run = config.checkpoint.initial_load_path, config.job.dump_folder
    assert folder is not None, "initial_load_in_hf needs initial_load_path"
    stored = pathlib.Path(run) / CONFIG_FILE
    if not is_hf_folder(pathlib.Path(folder)) and stored.is_file():
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
