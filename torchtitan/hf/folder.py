"""Open a Hugging Face folder as a source of weights.

Rank 0 reads config.json and the headers of the safetensors files, compares sizes, names, shapes and
types with the model, and sends the other ranks the place of each tensor. A safetensors file is a
JSON header and numbers: reading it executes nothing, and a truncated file is refused when opened.
"""

from __future__ import annotations

import logging
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.base.stored_json import read_json
from torchtitan.checkpoint.checksums import summarize, write_json
from torchtitan.checkpoint.source import ALL, ParameterFilter
from torchtitan.checkpoint.state import MODEL_STATE, OUTPUT, VOCABULARY
from torchtitan.checkpoint.storage import STATE, commit, draft_of
from torchtitan.hf.config import (
    VISIBLE_IN_SHAPES,
    architecture_of,
    check_sizes,
    family_of,
    find_quantization,
    read_config,
)
from torchtitan.hf.names import CONFIG, INDEX, WEIGHTS, Names, Slot
from torchtitan.hf.weights import (
    SCALE,
    HFWeights,
    StoredTensor,
    add_once,
    add_rows,
    attach_scales,
    check_match,
    stack_parts,
)
from torchtitan.mesh.ranks import on_first_rank, reason
from torchtitan.models.interface import cast
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)
ROPE_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers in files of old versions of transformers. They follow from the sizes and are not read."""
BUFFERS = ("rope.freqs", "freqs_cis")
"""Buffers in files of Meta and torchtitan."""


def is_hf_folder(path: Path) -> bool:
    """Return whether a folder has the files of a Hugging Face model."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in (WEIGHTS, INDEX))


def open_folder(
    path: Path,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    filter: ParameterFilter = ALL,
    may_differ: Collection[str] = (),
    group: dist.ProcessGroup | None,
) -> HFWeights:
    """Open a folder. Collective over `group`; None for this process only.

    Args:
        path: The folder.
        spec: Family of the model.
        architecture: Sizes of the model.
        filter: Parameters to read.
        may_differ: Keys of config.json that the job overrides.
        group: Ranks that read together.

    Raises:
        CheckpointError: A file is missing or damaged, or holds another model.
    """

    def survey() -> dict[str, StoredTensor]:
        if not is_hf_folder(path):
            raise CheckpointError(
                f"{path} must be a folder with {CONFIG} and {WEIGHTS} or {INDEX}: .bin files are "
                f"pickles and never read (checkpoint.initial_load_path, initial_load_in_hf)"
            )
        # with parameters excluded, only the remaining names and shapes must match
        exempt = {*may_differ, *(VISIBLE_IN_SHAPES if filter.exclude else ())}
        config = read_config(path)
        in_file = check_sizes(config, spec=spec, architecture=architecture, may_differ=exempt)
        # not the job's number: layers that a smaller job lacks are not extra layers
        stored_tensors = _read_headers(
            path,
            names=Names(spec.hf, architecture),
            block=find_quantization(config),
            num_layers=in_file.num_layers,
        )
        if in_file.tie_embeddings:
            stored_tensors.pop(OUTPUT, None)  # some writers save the tied head again
        check_match(path, stored_tensors, spec=spec, architecture=architecture, filter=filter)
        return stored_tensors

    tensors = on_first_rank(survey, group=group)
    return HFWeights(path=path, tensors=tensors, filter=filter, group=group)


def to_dcp(
    folder: Path,
    target: Path,
    *,
    dtype: torch.dtype,
    add_tokens: int = 0,
    models: Mapping[str, ModelSpec],
) -> tuple[ModelSpec, DecoderConfig]:
    """Convert a folder to a DCP folder of weights, outside of a run; return the model.

    `add_tokens` rows are appended to embedding and output head.

    Raises:
        CheckpointError: The folder is damaged, or its model is not in `models`.
    """
    config = read_config(folder)
    spec = family_of(config, models=models)
    architecture = architecture_of(config, spec=spec)
    source = open_folder(folder, spec=spec, architecture=architecture, group=None)
    model = cast(spec.build_meta(architecture), dtype).to_empty(device="cpu")
    weights = {name: p.detach() for name, p in model.named_parameters()}
    source.read(weights)
    for name in weights.keys() & VOCABULARY:
        weights[name] = add_rows(weights[name], add_tokens)
    _write_dcp(weights, target, state=MODEL_STATE)
    return spec, replace(architecture, vocab_size=architecture.vocab_size + add_tokens)


def torch_to_dcp(file: Path, target: Path, *, models: Mapping[str, ModelSpec]) -> int:
    """Convert a state dict of torch.save to a DCP folder of weights; return the number of tensors.

    The file has torchtitan's or Hugging Face's names, at the top or under "model". It is a pickle,
    and is read as plain data: one that names anything but tensors and containers is refused.

    Raises:
        CheckpointError: The file is missing, damaged, or holds something else.
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
    for spec in models.values():
        names = Names(spec.hf, next(iter(spec.flavors.values())))
        slots = {name: names.from_hf(name) for name in weights}
        if weights and all(slot is not None and slot[1] is None for slot in slots.values()):
            renamed = {slot[0]: weights[name] for name, slot in slots.items() if slot is not None}
            weights, state = renamed, {"rope": "halves"}
            break
    _write_dcp(weights, target, state=state)
    return len(weights)


def _write_dcp(weights: Mapping[str, Tensor], target: Path, *, state: Mapping[str, str]) -> None:
    draft = draft_of(target)
    if draft.exists():  # from a process that died
        shutil.rmtree(draft)
    dcp.save(dict(weights), storage_writer=dcp.FileSystemWriter(draft), no_dist=True)
    write_json(draft / STATE, state)
    commit(target)


def _read_headers(
    path: Path, *, names: Names, block: tuple[int, int] | None, num_layers: int
) -> dict[str, StoredTensor]:
    """Return the tensors of a folder by parameter."""
    index = _read_index(path)
    stored_tensors: dict[Slot, StoredTensor] = {}
    scales: dict[str, StoredTensor] = {}
    extra: set[str] = set()
    seen: set[tuple[str, str]] = set()
    for file in sorted(set(index.values())) or [WEIGHTS]:
        for name, (shape, dtype) in _read_header(path / file).items():
            if index.get(name, file) != file:
                continue
            seen.add((name, file))
            if ROPE_BUFFER.fullmatch(name):
                continue
            if names.is_extra_layer(name, num_layers=num_layers):
                extra.add(name)
                continue
            slot = names.from_hf(name) or (name, None)
            head_dim = names.rope_head_dim(slot[0])
            tensor = StoredTensor(
                name=name, shape=shape, dtype=dtype, rope_head_dim=head_dim, file=file
            )
            if block is not None and name.endswith(SCALE):
                scales[name] = tensor
            else:
                add_once(stored_tensors, slot, tensor, path=path)
    missing = {(n, file) for n, file in index.items() if not ROPE_BUFFER.fullmatch(n)} - seen
    if missing:
        missing_files = [f"{name} in {file}" for name, file in sorted(missing)]
        raise CheckpointError(f"{path / INDEX} names missing tensors: {summarize(missing_files)}")
    if extra:
        text = "%s: %d tensors of extra layers are not read, e.g. %s"
        logger.info(text, path, len(extra), min(extra))
    if block is not None:
        stored_tensors = attach_scales(path, stored_tensors, scales, block=block)
    return stack_parts(path, stored_tensors)


def _read_index(path: Path) -> dict[str, str]:
    """Return the file of each tensor by the index; an empty table if there is only one file."""
    if (path / WEIGHTS).is_file():
        return {}
    index = read_json(path / INDEX)["weight_map"]
    wrong: list[Any] = [index]
    if isinstance(index, dict):
        # plain names only: nothing outside of the folder is opened
        wrong = [v for v in index.values() if not isinstance(v, str) or Path(v).name != v]
    if wrong or not index:
        raise CheckpointError(
            f"{path / INDEX} is damaged: weight_map must name a file in the folder for each "
            f"tensor, got {str(wrong[0] if wrong else index)[:60]!r}"
        )
    return index


def _read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type of each tensor in a file."""
    try:
        check_is_file(file)
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: (tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error
