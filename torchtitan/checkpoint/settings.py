"""The settings of what is saved, and of what a run starts from: the [checkpoint] section."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field, NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.base.errors import Violation
from torchtitan.base.urls import is_plain_url, is_url
from torchtitan.config.needs import GIVEN, Needs
from torchtitan.config.types import (
    STRICT,
    FolderOrURL,
    InnerFolder,
    PathOrURL,
    Strings,
)

WEIGHT_FILES = (".pt", ".pth")
"""Endings of a single file of weights."""
_OF_A_STORE = (
    "staging_folder",
    "staging_keep_latest_k",
    "upload_check",
    "upload_timeout_seconds",
)
SAVES = Needs("enable", True)
HAS_NO_EFFECT = Needs("enable", True, is_notice=True)
ELSEWHERE = Needs("initial_load_path", GIVEN, "name what to read, or remove this")
WEIGHTS_ALONE = Needs("initial_load_model_only", True)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """When a run is saved, and from what it starts."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: FolderOrURL = "checkpoint"
    """Folder of the checkpoints, inside dump_folder; or a URL of this run's own in an object store,
    as s3://bucket/run, to which each is uploaded in the background."""
    staging_folder: InnerFolder = "checkpoint"
    """With a URL: folder inside dump_folder in which each checkpoint is saved before it is
    uploaded."""
    staging_keep_latest_k: PositiveInt = 1
    """With a URL: how many checkpoints stay in staging_folder, for fast restarts."""
    upload_check: Literal["checksum", "read_back"] = "checksum"
    """With a URL: how a file that was uploaded is verified. checksum: by the one that the store
    computed, or where it tells none by reading the file back. read_back: always so."""
    upload_timeout_seconds: PositiveInt = 600
    """With a URL: for how long a request that fails is repeated; then the run ends."""
    interval: PositiveInt = 500
    """Save every this many steps; the last step is always saved."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to see early that saving works."""
    last_save_model_only: bool = False
    """Beside the last checkpoint, which is a full one, write its weights alone to export/step-N
    inside folder."""
    last_save_in_hf: Annotated[bool, HAS_NO_EFFECT] = False
    """Write them as a folder of Hugging Face instead, whether last_save_model_only is on or not."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights under last_save_in_hf."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits for the files. async: it waits for a copy in memory alone.
    async_with_pinned_mem: the same from GPUs, into page-locked memory."""
    keep_latest_k: NonNegativeInt = 10
    """Checkpoints to keep, older ones are deleted; 0 keeps all."""
    keep_best: Annotated[NonNegativeInt, Needs("validation.enable", True), SAVES] = 0
    """Whole checkpoints of lowest validation loss to keep beside these; each save is then validated
    before it is made."""
    load_step: Annotated[int, Field(ge=-1), SAVES] = -1
    """Which step of initial_load_path to start from; -1: the newest. Without initial_load_path it
    must be the newest step of the run's own folder."""
    mode: Annotated[
        Literal["recover", "continue", "finetune"],
        SAVES,
        replace(ELSEWHERE, of=("finetune",)),
        Needs("initial_load_model_only", True, 'or write mode = "continue"', of=("finetune",)),
    ] = "recover"
    """recover: the same run, everything, and no setting that shapes the training may differ.
    continue: weights, optimizer and data position under other settings. finetune: the weights of
    initial_load_path, at step 0. A checkpoint that this very job saved is always recovered."""
    initial_load_path: Annotated[PathOrURL | None, SAVES] = None
    """Where to start from while the run's own folder holds no checkpoint: a step's folder, a folder
    of checkpoints (the newest), or a run's folder; or the URL of one of the first two. Or a single
    file of weights (.pt, .pth), by this library's names or those of Hugging Face."""
    initial_load_model_only: bool = True
    """Take the weights alone from initial_load_path; false takes everything, as mode says."""
    initial_load_in_hf: Annotated[bool, HAS_NO_EFFECT, ELSEWHERE, WEIGHTS_ALONE] = False
    """initial_load_path is a folder of Hugging Face: config.json and safetensors files."""
    initial_load_rope: Annotated[
        Literal["auto", "interleaved", "halves"],
        HAS_NO_EFFECT,
        ELSEWHERE,
        Needs("initial_load_in_hf", False),
    ] = "auto"
    """Which channels of a head turn together in a plain DCP folder or a single file that has this
    library's names: (2i, 2i + 1), as here, or (i, i + D/2), as in Hugging Face's. auto: what the
    folder says, and where it says nothing what torchtitan 0.2 writes: Llama interleaved, Qwen3 in
    halves."""
    exclude_from_loading: Annotated[Strings, HAS_NO_EFFECT] = ()
    """What not to load: components (model, optimizer, lr_scheduler, dataloader, train_state), and
    shell patterns of parameter names, as "output.*", which keep their initial values."""
    grow_vocab: Annotated[bool, SAVES, ELSEWHERE, WEIGHTS_ALONE] = False
    """Take embedding and output head from weights of a smaller vocabulary: the rows behind theirs
    keep their initial values."""
    verify_on_load: bool = True
    """Compare a checkpoint's files with its checksums before loading it."""
    save_before_seconds: Annotated[PositiveInt | None, SAVES] = None
    """Seconds after the start of the job at which it saves and ends: its wall-clock limit less a
    margin for a step and a save; if not given it has no limit."""

    def violations(self) -> Iterator[Violation]:
        """Check what is loaded, and the type of what is exported."""
        exports = self.enable and self.last_save_model_only
        if self.export_dtype != "float32" and not self.last_save_in_hf:
            yield Violation(
                ("export_dtype", "last_save_in_hf"),
                f"{'' if exports else 'has no effect: it '}needs last_save_in_hf = true, got "
                "false; the other checkpoints keep training.dtype; set that, or remove this",
                is_notice=not exports,
            )
        for key in ("folder", "initial_load_path"):
            value = getattr(self, key)
            if value is not None and is_url(value) and not is_plain_url(value):
                # without the value: it may hold a password, and messages go into logs
                yield Violation(
                    (key,),
                    "must be a URL of a folder without credentials or options; give these to the "
                    "store's client, by its environment variables or its own files",
                )
        if not is_url(self.folder):
            for key in _OF_A_STORE:
                if getattr(self, key) != getattr(type(self), key):
                    rule = (
                        f'has no effect: it needs a URL as folder, got "{self.folder}"; remove this'
                    )
                    yield Violation((key, "folder"), rule, is_notice=True)
        if self.enable:
            yield from self._load_violations()

    @property
    def local_folder(self) -> str:
        """Return the folder inside dump_folder in which checkpoints are saved."""
        return self.staging_folder if is_url(self.folder) else self.folder

    def _load_violations(self) -> Iterator[Violation]:
        path, excluded = self.initial_load_path, self.exclude_from_loading
        weights_alone = path is not None and self.initial_load_model_only
        ties = ("mode", "initial_load_path", "initial_load_model_only")
        if self.mode == "continue" and weights_alone:
            yield Violation(
                ties,
                "takes optimizer and data position too, but initial_load_model_only is true; set "
                'it false, or write mode = "finetune" for the weights alone',
            )
        if excluded and self.mode == "recover" and not weights_alone:
            yield Violation(
                ("exclude_from_loading", *ties),
                'leaves something out, but mode = "recover" loads everything; write mode = '
                '"continue", or mode = "finetune" with an initial_load_path',
            )
        if "model" in excluded and weights_alone:
            yield Violation(
                ("exclude_from_loading", *ties),
                'leaves nothing to load with "model" in it; remove it, or initial_load_path',
            )
        is_foreign = self.initial_load_in_hf or (path or "").endswith(WEIGHT_FILES)
        if path is not None and is_url(path) and is_foreign:
            yield Violation(
                ("initial_load_path",),
                f'may be a URL of steps that this library saved alone, got "{path}"; copy weights '
                f"of other kinds to a disk, and name the copy",
            )
        elif path is not None and path.endswith(WEIGHT_FILES):
            if self.initial_load_in_hf:
                yield Violation(
                    ("initial_load_in_hf", "initial_load_path"),
                    f'is for a folder, got the file "{path}", whose names tell what it is; remove '
                    "this",
                )
            if not self.initial_load_model_only:
                yield Violation(
                    ("initial_load_model_only", "initial_load_path"),
                    f'asks for all of a run, and "{path}" is a file of weights alone; remove this',
                )
