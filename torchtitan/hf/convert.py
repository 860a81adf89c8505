"""Converts a Hugging Face folder to a DCP folder of weights, outside of any run.

A run reads such folders directly (`read.py`). This is for other tools that read PyTorch's DCP
format, and for reading a folder again and again when the original is slow to reach.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp

from torchtitan.checkpoint.checksums import write_json
from torchtitan.checkpoint.state import MODEL_STATE
from torchtitan.checkpoint.storage import STATE, commit, draft_of
from torchtitan.hf.config import architecture_of, family_of, read_config
from torchtitan.hf.folder import open_folder
from torchtitan.models.interface import cast
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec


def to_dcp(
    folder: Path, target: Path, *, dtype: torch.dtype, models: Mapping[str, ModelSpec]
) -> tuple[ModelSpec, DecoderConfig]:
    """Write the weights of a folder of Hugging Face as the DCP folder `target`, by our names.

    Returns the model that they are of.

    Raises:
        CheckpointError: The folder is damaged, or of no model in `models`.
    """
    config = read_config(folder)
    spec = family_of(config, models=models)
    architecture = architecture_of(config, spec=spec)
    source = open_folder(folder, spec=spec, architecture=architecture, group=None)
    model = cast(spec.build_meta(architecture), dtype).to_empty(device="cpu")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    source.read(weights)
    draft = draft_of(target)
    if draft.exists():  # of a process that died
        shutil.rmtree(draft)
    dcp.save(weights, storage_writer=dcp.FileSystemWriter(draft), no_dist=True)
    write_json(draft / STATE, MODEL_STATE)
    commit(target)
    return spec, architecture
