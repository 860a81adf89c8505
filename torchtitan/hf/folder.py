"""Open a Hugging Face folder as a source of weights.

Rank 0 reads config.json and the headers of the safetensors files, compares sizes, names, shapes and
types with the model, and sends the other ranks the place of each tensor. A safetensors file is a
JSON header and numbers: reading it executes nothing, and a truncated file is refused when opened.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file, read_json
from torchtitan.checkpoint.checksums import summarize
from torchtitan.checkpoint.source import ALL, ParameterFilter
from torchtitan.checkpoint.state import OUTPUT
from torchtitan.hf.config import (
    MXFP4,
    VISIBLE_IN_SHAPES,
    check_sizes,
    find_quantization,
    read_config,
    refuse_adapter,
)
from torchtitan.hf.names import CONFIG, INDEX, WEIGHTS, Names, Slot, any_layer
from torchtitan.hf.weights import (
    DTYPES,
    EXPONENTS,
    NIBBLES,
    SCALE,
    HFWeights,
    StoredTensor,
    add_once,
    attach_exponents,
    attach_scales,
    check_match,
    open_slice,
    split_fused,
    stack_parts,
)
from torchtitan.mesh.ranks import on_first_rank, reason
from torchtitan.models.interface import TIED
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)
PACKED = "experts.gate_up_proj"
ROWS = 4096
"""Rows of a matrix that are compared at a time."""
ROPE_BUFFER = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq")
"""Buffers in files of old versions of transformers. They follow from the sizes and are not read."""


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

    `may_differ` has the keys of config.json that the job overrides. Raises CheckpointError if a
    file is missing or damaged, or holds another model.
    """

    def survey() -> dict[str, StoredTensor]:
        refuse_adapter(path)
        if not is_hf_folder(path):
            raise CheckpointError(
                f"{path} must be a folder with {CONFIG} and {WEIGHTS} or {INDEX}: .bin files are "
                f"pickles and never read (checkpoint.initial_load_path, initial_load_in_hf)"
            )
        # with parameters excluded, only the remaining names and shapes must match
        exempt = {*may_differ, *(VISIBLE_IN_SHAPES if filter.exclude else ())}
        config = read_config(path)
        in_file = check_sizes(config, spec=spec, architecture=architecture, may_differ=exempt)
        names, model = Names(spec.hf, architecture), spec.build_meta(architecture)
        shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
        # not the job's number: layers that a smaller job lacks are not extra layers
        stored_tensors = _read_headers(
            path,
            names=names,
            shapes=shapes,
            block=find_quantization(config),
            num_layers=in_file.num_layers,
        )
        if in_file.tie_embeddings and OUTPUT in stored_tensors:
            # some writers save the tied head again
            head, embedding = stored_tensors.pop(OUTPUT), stored_tensors.get(TIED)
            if embedding is not None and not _are_equal(path, head, embedding):
                raise CheckpointError(
                    f"{path} has tie_word_embeddings = true, and {head.name} differs from the "
                    f"embedding: write false into {CONFIG} to use it, or remove it from the files"
                )
        check_match(path, stored_tensors, names=names, shapes=shapes, filter=filter)
        return stored_tensors

    tensors = on_first_rank(survey, group=group)
    return HFWeights(path=path, tensors=tensors, filter=filter, group=group)


def _are_equal(path: Path, one: StoredTensor, other: StoredTensor) -> bool:
    """Return whether two stored matrices hold the same numbers, in the narrower of their types and
    in the rows that both have: a writer may have padded one."""
    if one.shape[1:] != other.shape[1:]:
        return False
    types = [DTYPES.get(tensor.dtype, torch.float32) for tensor in (one, other)]
    dtype, num_rows = min(types, key=lambda t: t.itemsize), min(one.shape[0], other.shape[0])
    with open_slice(path, one) as a, open_slice(path, other) as b:
        for first in range(0, num_rows, ROWS):
            rows = slice(first, min(first + ROWS, num_rows))
            x, y = a[rows].to(dtype).float(), b[rows].to(dtype).float()
            if not torch.equal(x.nan_to_num(), y.nan_to_num()):
                return False
    return True


def _read_headers(
    path: Path,
    *,
    names: Names,
    shapes: Mapping[str, tuple[int, ...]],
    block: tuple[int, int] | None,
    num_layers: int,
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
            if name.endswith(PACKED) and any_layer(name) not in names.format.alternating:
                raise CheckpointError(
                    f"{path}: {name} packs all experts of a layer, as transformers holds them in "
                    f"memory; save_pretrained of transformers writes one tensor per expert"
                )
            if block == MXFP4 and name.endswith(EXPONENTS):
                scales[name] = StoredTensor(name=name, shape=shape, dtype=dtype, file=file)
                continue
            if block == MXFP4 and name.endswith(NIBBLES) and len(shape) == 4:
                name = name.removesuffix(NIBBLES)
                shape = (shape[0], 2 * shape[2] * shape[3], shape[1])
            slot = names.from_hf(name) or (name, None)
            heads = names.rope_heads(slot[0])
            tensor = StoredTensor(name=name, shape=shape, dtype=dtype, rope_heads=heads, file=file)
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
    if block == MXFP4:
        stored_tensors = attach_exponents(path, stored_tensors, scales)
    elif block is not None:
        stored_tensors = attach_scales(path, stored_tensors, scales, block=block)
    stored_tensors = split_fused(path, stored_tensors, names=names, shapes=shapes)
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
