"""Converts a Hugging Face folder to a DCP folder of weights, outside of any run.

A run reads such folders directly (`read.py`). This is for other tools that read PyTorch's DCP
format, and for reading a folder again and again when the original is slow to reach.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import write_json
from torchtitan.checkpoint.folders import commit, draft_of
from torchtitan.checkpoint.state import MODEL_STATE
from torchtitan.checkpoint.storage import STATE
from torchtitan.hf.config import (
    ROTATION,
    architecture_of,
    family_of,
    fitting_flavors,
    read_config,
    rotation_settings,
)
from torchtitan.hf.folder import open_folder
from torchtitan.models.spec import DecoderConfig, ModelSpec


@dataclass(frozen=True)
class Found:
    """The model that a folder holds."""

    spec: ModelSpec
    flavor: str
    """The flavor that has its sizes, and perhaps another rotation."""
    architecture: DecoderConfig
    settings: tuple[str, ...]
    """What a job sets beside the flavor to be of this model."""


def find_flavor(folder: Path, *, models: Mapping[str, ModelSpec]) -> Found:
    """Return which of `models` a folder of Hugging Face is."""
    config = read_config(folder)
    spec = family_of(config, models=models)
    architecture = architecture_of(config, spec=spec)
    for flavor in fitting_flavors(config, spec=spec):
        return Found(spec, flavor, architecture, ())
    for flavor in fitting_flavors(config, spec=spec, passed_over=ROTATION):
        return Found(spec, flavor, architecture, tuple(rotation_settings(config)))
    raise CheckpointError(
        f"{config.path} must be of a model that is built here, got a {spec.hf.architecture} in "
        f"sizes that no flavor of {spec.name} has; add one to torchtitan/models/{spec.name}.py"
    )


def to_dcp(
    folder: Path, target: Path, *, dtype: torch.dtype, models: Mapping[str, ModelSpec]
) -> Found:
    """Write the weights of a folder of Hugging Face as the DCP folder `target`, by our names.

    Raises:
        CheckpointError: The folder is damaged, or of no model in `models`.
    """
    found = find_flavor(folder, models=models)
    source = open_folder(folder, spec=found.spec, architecture=found.architecture, group=None)
    model = found.spec.build_meta(found.architecture).to(dtype).to_empty(device="cpu")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    source.read(weights)
    draft = draft_of(target)
    if draft.exists():  # of a process that died
        shutil.rmtree(draft)
    dcp.save(weights, storage_writer=dcp.FileSystemWriter(draft), no_dist=True)
    write_json(draft / STATE, MODEL_STATE)
    commit(target)
    return found
