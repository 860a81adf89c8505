"""DCP folders of weights, made from a Hugging Face folder or from a file of torch.save."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.checkpoint.checksums import write_json
from torchtitan.checkpoint.state import MODEL_STATE, VOCABULARY
from torchtitan.checkpoint.storage import STATE, commit, draft_of
from torchtitan.config.settings import literal, values_of
from torchtitan.hf.config import architecture_of, family_of, read_config
from torchtitan.hf.folder import ROPE_BUFFER, open_folder
from torchtitan.hf.names import Names
from torchtitan.hf.weights import add_rows
from torchtitan.mesh.ranks import reason
from torchtitan.models.families import MODELS, to_settings
from torchtitan.models.interface import cast
from torchtitan.models.settings import ModelSection

BUFFERS = ("rope.freqs", "freqs_cis")
"""Buffers in files of Meta and torchtitan."""


def from_hf(folder: Path, out: Path, *, dtype: str, add_tokens: int = 0) -> str:
    """Write the weights of a Hugging Face folder as a DCP folder; return the job's settings.

    `add_tokens` rows are appended to embedding and output head. Raises CheckpointError if the
    folder is damaged, or its model is unknown.
    """
    config = read_config(folder)
    spec = family_of(config, models=MODELS)
    architecture = architecture_of(config, spec=spec)
    source = open_folder(folder, spec=spec, architecture=architecture, group=None)
    model = cast(spec.build_meta(architecture), getattr(torch, dtype)).to_empty(device="cpu")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    source.read(weights)
    for name in weights.keys() & VOCABULARY:
        weights[name] = add_rows(weights[name], add_tokens)
    _write_dcp(weights, out, state=MODEL_STATE)
    architecture = replace(architecture, vocab_size=architecture.vocab_size + add_tokens)
    default, sizes = values_of(ModelSection()), values_of(to_settings(spec, architecture))
    changed = {path: value for path, value in sizes.items() if value != default[path]}
    lines = [f"model.{'.'.join(path)} = {literal(value)}" for path, value in changed.items()]
    return f"{out}: {dtype} weights; a job of them sets\n" + "\n".join(lines)


def from_torch(file: Path, out: Path) -> str:
    """Write the state dict in a file of torch.save as a DCP folder; return a line about it.

    The file has torchtitan's or Hugging Face's names, at the top or under "model". It is a pickle,
    and is read as plain data: one that names anything but tensors and containers is refused. Raises
    CheckpointError if the file is missing, damaged, or holds something else.
    """
    try:
        check_is_file(file)
        content = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged bytes raise KeyError, TypeError, struct.error ...
        # torch's message first explains how to execute the file nevertheless
        match = re.search(r"WeightsUnpickler error: (.+)", str(error))
        raise CheckpointError(
            f"{file} cannot be read, nothing in it was run: {match[1] if match else reason(error)}"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    weights: dict[str, Tensor] = {}
    for name, value in content.items() if isinstance(content, dict) else [("", content)]:
        if name in BUFFERS or (isinstance(name, str) and ROPE_BUFFER.fullmatch(name)):
            continue
        is_weight = isinstance(value, Tensor) and value.layout == torch.strided
        if not (is_weight and isinstance(name, str) and value.device.type == "cpu"):
            raise CheckpointError(
                f'{file} must hold dense tensors by name, at the top or under "model", got '
                f"{str((name, value))[:60]}"
            )
        weights[name] = value
    state: Mapping[str, str] = {}
    for spec in MODELS.values():
        names = Names(spec.hf, next(iter(spec.flavors.values())))
        slots = {name: names.from_hf(name) for name in weights}
        if weights and all(slot is not None and slot[1] is None for slot in slots.values()):
            renamed = {slot[0]: weights[name] for name, slot in slots.items() if slot is not None}
            weights, state = renamed, {"rope": "halves"}
            break
    _write_dcp(weights, out, state=state)
    return f"{out}: {len(weights)} tensors; a job reads them by checkpoint.initial_load_path"


def _write_dcp(weights: Mapping[str, Tensor], target: Path, *, state: Mapping[str, str]) -> None:
    draft = draft_of(target)
    if draft.exists():  # from a process that died
        shutil.rmtree(draft)
    dcp.save(dict(weights), storage_writer=dcp.FileSystemWriter(draft), no_dist=True)
    write_json(draft / STATE, state)
    commit(target)
