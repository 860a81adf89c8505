"""The settings of what is saved, and of what a run starts from: the [checkpoint] section."""

from __future__ import annotations

from typing import Literal

from pydantic import NonNegativeInt, PositiveInt
from pydantic.dataclasses import dataclass

from torchtitan.config.types import STRICT, Strings, Text

WEIGHT_FILES = (".pt", ".pth")
"""Endings of a single file of weights."""


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """When a run is saved, and from what it starts."""

    enable: bool = False
    """Save checkpoints, and resume from the newest one in the folder."""
    folder: Text = "checkpoint"
    """Folder of the checkpoints, always inside dump_folder."""
    interval: PositiveInt = 500
    """Save every this many steps; the last step is always saved."""
    enable_first_step_checkpoint: bool = False
    """Also save after step 1, to see early that saving works."""
    last_save_model_only: bool = False
    """Beside the last checkpoint, which is a full one, write its weights alone to export/step-N
    inside folder."""
    last_save_in_hf: bool = False
    """Write them as a folder of Hugging Face instead, whether last_save_model_only is on or not."""
    export_dtype: Literal["float16", "bfloat16", "float32"] = "float32"
    """Type of the weights under last_save_in_hf."""
    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """disabled: training waits for the files. async: it waits for a copy in memory alone.
    async_with_pinned_mem: the same from GPUs, into page-locked memory."""
    keep_latest_k: NonNegativeInt = 10
    """Checkpoints to keep, older ones are deleted; 0 keeps all."""
    keep_best: NonNegativeInt = 0
    """Whole checkpoints of lowest validation loss to keep beside these; each save is then validated
    before it is made."""
    load_step: int = -1
    """Which step of initial_load_path to start from; -1: the newest. Without initial_load_path it
    must be the newest step of the run's own folder."""
    mode: Literal["recover", "continue", "finetune"] = "recover"
    """recover: the same run, everything, and no setting that shapes the training may differ.
    continue: weights, optimizer and data position under other settings. finetune: the weights of
    initial_load_path, at step 0. A checkpoint that this very job saved is always recovered."""
    initial_load_path: Text | None = None
    """Where to start from while the run's own folder holds no checkpoint: a step's folder, a folder
    of checkpoints (the newest), or a run's folder. Or a single file of weights (.pt, .pth), by this
    library's names or those of Hugging Face."""
    initial_load_model_only: bool = True
    """Take the weights alone from initial_load_path; false takes everything, as mode says."""
    initial_load_in_hf: bool = False
    """initial_load_path is a folder of Hugging Face: config.json and safetensors files."""
    initial_load_rope: Literal["auto", "interleaved", "halves"] = "auto"
    """Which channels of a head turn together in a plain DCP folder or a single file that has this
    library's names: (2i, 2i + 1), as here, or (i, i + D/2), as in Hugging Face's. auto: what the
    folder says, and where it says nothing what torchtitan 0.2 writes: Llama interleaved, Qwen3 in
    halves."""
    exclude_from_loading: Strings = ()
    """What not to load: components (model, optimizer, lr_scheduler, dataloader, train_state), and
    shell patterns of parameter names, as "output.*", which keep their initial values."""
    grow_vocab: bool = False
    """Take embedding and output head from weights of a smaller vocabulary: the rows behind theirs
    keep their initial values."""
    verify_on_load: bool = True
    """Compare a checkpoint's files with its checksums before loading it."""
    save_before_seconds: PositiveInt | None = None
    """Seconds after the start of the job at which it saves and ends: its wall-clock limit less a
    margin for a step and a save; if not given it has no limit."""
