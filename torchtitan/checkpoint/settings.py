"""The [checkpoint] section: saving, and the start of a run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Literal

from torchtitan.base.errors import ConfigError, Violation
from torchtitan.base.urls import is_plain_url, is_url
from torchtitan.config.settings import (
    SET,
    NonNegativeInt,
    PathOrURL,
    PositiveInt,
    Range,
    Requires,
    Text,
    inside_dump_folder,
    path_or_url,
)


def _folder_or_url(value: str) -> None:
    path_or_url(value) if is_url(value) else inside_dump_folder(value)


COMPONENTS = ("model", "optimizer", "lr_scheduler", "dataloader", "train_state")
"""Parts of a checkpoint, each loadable alone (`state.py`)."""
HAS_NO_EFFECT = Requires("enable", True, is_notice=True)
ELSEWHERE = Requires("initial_load_path", SET, "name what to read, or remove this")
GOING_BACK = Requires(
    "initial_load_path",
    SET,
    "a run resumes from its newest step; to go back, name its folder there, with "
    "initial_load_model_only = false and another job.dump_folder",
)
WEIGHTS_ALONE = Requires("initial_load_model_only", True)


EXPORT = "export"
"""Folder of the last exports, beside the steps."""


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When to save a run, and which checkpoint or weights it starts from."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder. initial_load_path is read
    with and without it."""
    folder: Annotated[Text, _folder_or_url] = "checkpoint"
    """Folder of the checkpoints, inside dump_folder; or a URL of this run's own in an object store,
    as s3://bucket/run, to which each is uploaded in the background."""
    staging_folder: Annotated[Text, inside_dump_folder] = "checkpoint"
    """With a URL: folder inside dump_folder for checkpoints before they are uploaded."""
    staging_keep_latest_k: PositiveInt = 1
    """With a URL: how many checkpoints stay in staging_folder, for fast restarts."""
    upload_timeout_seconds: PositiveInt = 600
    """With a URL: for how long a request that fails is repeated; then the run ends."""
    interval: PositiveInt = 500
    """Save every this many steps; the last step is always saved."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to see early that saving works."""
    last_save_model_only: bool = False
    """At the end of training also write the weights to export/step-N inside folder. The last
    checkpoint is a full one in any case."""
    last_save_in_hf: Annotated[bool, HAS_NO_EFFECT] = False
    """Write the weights as a Hugging Face folder instead, also without last_save_model_only."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights that last_save_model_only and last_save_in_hf write."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits until the files are written. async: until the state is copied to
    host memory. async_with_pinned_mem: the same, into page-locked memory, from GPUs."""
    keep_latest_k: NonNegativeInt = 10
    """Number of newest checkpoints to keep; 0 keeps all."""
    keep_best: Annotated[NonNegativeInt, HAS_NO_EFFECT, Requires("validation.enable", True)] = 0
    """Number of checkpoints with the lowest validation loss to keep in addition. Each save is then
    preceded by a validation."""
    load_step: Annotated[int, Range(ge=-1), GOING_BACK] = -1
    """Step of initial_load_path to start from; -1: the newest."""
    mode: Annotated[
        Literal["recover", "continue", "finetune"],
        replace(ELSEWHERE, of=("finetune",)),
        Requires("initial_load_model_only", True, 'or write mode = "continue"', of=("finetune",)),
    ] = "recover"
    """recover: resume the same run; settings that shape the training may not differ. continue: keep
    weights, optimizer and data position with other settings. finetune: load the weights of
    initial_load_path and start at step 0. A checkpoint of this very job is always recovered."""
    initial_load_path: PathOrURL | None = None
    """Checkpoint to start from if the run's own folder has none: the folder of a step, of
    checkpoints (the newest is used) or of a run; or the URL of a step or of checkpoints."""
    initial_load_model_only: bool = True
    """Load only the weights of initial_load_path; false loads all components that mode loads."""
    initial_load_in_hf: Annotated[bool, ELSEWHERE, WEIGHTS_ALONE] = False
    """initial_load_path is a Hugging Face folder, with config.json and safetensors files, or the
    name of a model of its Hub, such as Qwen/Qwen3-0.6B."""
    initial_load_rope: Annotated[
        Literal["auto", "interleaved", "halves"],
        ELSEWHERE,
        Requires("initial_load_in_hf", False),
    ] = "auto"
    """Row order of wq and wk in a DCP folder of another writer. interleaved: channels (2i, 2i + 1)
    of a head are rotated together, as in this library. halves: channels (i, i + D/2), as in Hugging
    Face files. auto: the order that the folder states, else the order of torchtitan 0.2: Llama
    interleaved, Qwen3 halves."""
    exclude_from_loading: tuple[Text, ...] = ()
    """Parts that keep their initial values: components (model, optimizer, dataloader, train_state),
    parameters with their optimizer state (shell patterns of names, e.g. "output.*") or only that
    state ("optimizer.output.*"). lr_scheduler is never loaded: the settings count."""
    verify_on_load: bool = True
    """Compare a checkpoint's files with its checksums before loading it."""
    save_timeout_seconds: PositiveInt = 3600
    """Timeout of a rank that waits for other ranks while a checkpoint is saved or loaded."""

    @property
    def local_folder(self) -> str:
        """Folder inside dump_folder where checkpoints are saved."""
        return self.staging_folder if is_url(self.folder) else self.folder

    def violations(self) -> Iterator[Violation]:
        """Check URLs, and settings that would have no effect."""
        path = self.initial_load_path
        for key, value in (("folder", self.folder), ("initial_load_path", path)):
            if value is not None and is_url(value) and not is_plain_url(value):
                # without the value: it may hold a password, and messages go into logs
                yield Violation(
                    (key,),
                    "must be a URL of a folder without credentials or options; give these to the "
                    "store's client, by its environment variables or its own files",
                )
        changes = self.mode != "recover" or bool(self.exclude_from_loading)
        if changes and not self.enable and path is None:
            rule = "have no effect without enable = true or initial_load_path"
            yield Violation(("exclude_from_loading", "mode", "enable"), rule)
        if path is not None and is_url(path) and self.initial_load_in_hf:
            rule = "must be a folder on a disk, not a URL, with initial_load_in_hf"
            yield Violation(("initial_load_path", "initial_load_in_hf"), rule)
        if "model" in self.exclude_from_loading and path and self.initial_load_model_only:
            rule = 'leaves nothing to load with "model" in it; remove it, or initial_load_path'
            yield Violation(("exclude_from_loading", "initial_load_model_only"), rule)
        loads_all = path is not None and not self.initial_load_model_only
        if self.exclude_from_loading and self.mode == "recover" and loads_all:
            yield Violation(
                ("exclude_from_loading", "mode", "initial_load_path", "initial_load_model_only"),
                'leaves something out, but mode = "recover" loads everything of another run; write '
                'mode = "continue", or initial_load_model_only = true',
            )


def check_excluded(entries: Iterable[str]) -> None:
    """Raise ConfigError for an entry of `exclude_from_loading` that is no component and, without a
    dot or wildcard, no pattern of parameters."""
    for entry in entries:
        if entry not in COMPONENTS and not {*entry.removeprefix("optimizer.")} & {*".*?["}:
            raise ConfigError.at(
                "checkpoint.exclude_from_loading",
                f'must be of {", ".join(COMPONENTS)}, or patterns as "output.*", got {entry!r}',
            )
