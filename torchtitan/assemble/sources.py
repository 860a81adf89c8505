"""Which source of weights a path means, for a run that starts, a model that generates, a script."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch.distributed as dist

from torchtitan.assemble.hf import chosen_rotation
from torchtitan.assemble.layout import Layout
from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.plain import PlainFolder, row_order
from torchtitan.checkpoint.ranks import on_first_rank
from torchtitan.checkpoint.rows import HeadDim
from torchtitan.checkpoint.settings import WEIGHT_FILES
from torchtitan.checkpoint.source import Selection, Step, WeightSource, find_step, is_plain_dcp
from torchtitan.checkpoint.start import Intention
from torchtitan.checkpoint.state import VOCABULARY
from torchtitan.checkpoint.storage import read_manifest
from torchtitan.config.trajectory import Job
from torchtitan.hf.beside import warn_of_other_tokenizer
from torchtitan.hf.file import open_file
from torchtitan.hf.folder import is_hf_folder, open_folder
from torchtitan.hf.names import Names
from torchtitan.job import Config
from torchtitan.lora.export import CONFIG as ADAPTER_CONFIG
from torchtitan.lora.export import weight_beside
from torchtitan.lora.layer import is_adapter

logger = logging.getLogger(__name__)
CONFIG_FILE = "config.toml"


def open_source(
    asked: Intention, *, config: Config, layout: Layout, group: dist.ProcessGroup
) -> WeightSource:
    """Open what `checkpoint.initial_load_path` names, to take from it what is asked for.

    Raises:
        CheckpointError: It is not there, damaged, or of another model or kind than the settings
            say.
    """
    settings = config.checkpoint
    assert settings.initial_load_path is not None
    path, rope = Path(settings.initial_load_path), settings.initial_load_rope
    selection = Selection(
        exclude=() if asked == "recover" else settings.exclude_from_loading,
        may_grow=VOCABULARY if settings.grow_vocab else (),
        optional=is_adapter if config.lora.rank and asked == "finetune" else None,
    )
    how: dict[str, Any] = {"selection": selection, "group": group}
    model: dict[str, Any] = {"spec": layout.spec, "architecture": layout.architecture}
    if path.suffix in WEIGHT_FILES:
        return open_file(path, rope=rope, **model, **how)
    if settings.initial_load_in_hf:
        found = open_folder(path, chosen=chosen_rotation(config.model), **model, **how)
        warn_of_other_tokenizer(config.model.tokenizer_path, origin=path)
        return found
    if on_first_rank(lambda: is_hf_folder(path), group=group):
        raise CheckpointError(
            f"checkpoint.initial_load_path {path} is a folder of Hugging Face; to start from its "
            f"weights write checkpoint.initial_load_in_hf = true"
        )
    step = find_step(
        path,
        subfolder=settings.folder,
        load_step=settings.load_step,
        verify=settings.verify_on_load,
        group=group,
    )
    if on_first_rank(lambda: is_plain_dcp(step), group=group):
        halves = _find_halves(step, config=config, layout=layout, group=group)
        return PlainFolder(path=step, in_halves=halves, **how)
    if rope != "auto":
        raise CheckpointError(
            f"checkpoint.initial_load_rope is for weights of other writers, and {step} is of "
            f"this library, which knows the order of its rows; remove it"
        )
    return Step(path=step, **how)


def _find_halves(
    path: Path, *, config: Config, layout: Layout, group: dist.ProcessGroup
) -> HeadDim:
    """Find the parameters whose rows lie in halves in a plain DCP folder."""
    logger.info("%s has no sizes but shapes: the others are those of model.flavor", path)
    setting = config.checkpoint.initial_load_rope
    if row_order(path, setting=setting, spec=layout.spec, group=group) == "interleaved":
        return lambda name: None
    names = Names(layout.spec.hf, layout.architecture)
    return lambda name: names.head_dim(weight_beside(name) or name)


def find_run_step(path: Path, *, verify: bool, group: dist.ProcessGroup | None = None) -> Path:
    """Return the step of ours that `path` means, with the settings that it was saved under.

    Raises:
        CheckpointError: There is none, or the one that was named is damaged.
    """
    if (path / ADAPTER_CONFIG).is_file():
        raise CheckpointError(
            f"{path} holds a LoRA adapter without the model: name the step of the run that trained "
            f'it, or let that run export with lora.save = "merged"'
        )
    stored, subfolder = path / CONFIG_FILE, "checkpoint"
    if stored.is_file():
        subfolder = Job.stored_in(stored).config.checkpoint.folder
    step = find_step(path, subfolder=subfolder, verify=verify, group=group)
    if on_first_rank(lambda: is_plain_dcp(step), group=group):
        raise CheckpointError(
            f"{step} holds weights without the settings of a run; name a step that this library "
            f"saved, or a folder of Hugging Face"
        )
    return step


def read_settings(step: Path) -> Config:
    """Return the settings that a step was saved under, by its manifest."""
    manifest = read_manifest(step)
    return Job.stored(manifest["config"], file=manifest.path).config
