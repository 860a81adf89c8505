"""Opens a Hugging Face folder as a source of weights: by headers alone, before any long work.

A safetensors file is a JSON header and plain numbers: reading it runs nothing, and a file that is
cut short is refused when it is opened. Rank 0 reads config.json and the headers, compares sizes,
names, shapes and types with the model's, and tells all ranks where each tensor lies.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file, read_json
from torchtitan.checkpoint.checksums import summarize
from torchtitan.checkpoint.source import ALL, ParameterFilter
from torchtitan.checkpoint.state import OUTPUT
from torchtitan.hf.blocks import SCALE, Blocks, stored_blocks
from torchtitan.hf.config import (
    SEEN_IN_SHAPES,
    check_config,
    read_config,
    sizes_of,
    stored_sizes,
)
from torchtitan.hf.names import CONFIG, INDEX, WEIGHTS, Names, Place
from torchtitan.hf.read import HFWeights, StoredTensor, attach_scales, check_fit, stack
from torchtitan.mesh.ranks import on_first_rank, reason
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec

logger = logging.getLogger(__name__)
# a buffer that old versions of transformers saved; it follows from the sizes
NO_WEIGHT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq\b.*")


def is_hf_folder(path: Path) -> bool:
    """Tell whether a folder looks like a model of Hugging Face."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in (WEIGHTS, INDEX))


def open_folder(
    path: Path,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    filter: ParameterFilter = ALL,
    chosen: Collection[str] = (),
    group: dist.ProcessGroup | None,
) -> HFWeights:
    """Read the headers of a folder on rank 0, and tell all ranks.

    `chosen` are sizes in which the job is meant to differ.

    Raises:
        CheckpointError: It is not such a folder, or a file of it is damaged, or it is of another
            model than `architecture`, a size of `spec`.
    """

    def survey() -> dict[str, StoredTensor]:
        _check_is_folder(path)
        # with parameters left out, their names and shapes say more exactly what has to agree
        exempt = {*chosen, *(SEEN_IN_SHAPES if filter.exclude else ())}
        exempt |= {"vocab_size"} if filter.may_grow else set()
        config = read_config(path)
        check_config(config, spec=spec, architecture=architecture, seen_elsewhere=exempt)
        there, ours = stored_sizes(config), sizes_of(architecture)
        for name in sorted(chosen):
            if there[name] != ours[name]:
                text = "%s of the rotation: %s in %s, %s in this job"
                logger.info(text, name, there[name], config.path, ours[name])
        names = Names(spec.hf, architecture)
        # the folder's own number: where the job has fewer layers, it lacks some of the model's
        found = _survey(
            path,
            names=names,
            blocks=stored_blocks(config),
            num_layers=there["num_hidden_layers"],
        )
        if there["tie_word_embeddings"]:
            # some writers save the tied head all the same, which transformers does not read either
            found.pop(OUTPUT, None)
        check_fit(path, found, spec=spec, architecture=architecture, filter=filter)
        return found

    tensors = on_first_rank(survey, group=group)
    return HFWeights(path=path, tensors=tensors, filter=filter, group=group)


def _check_is_folder(path: Path) -> None:
    if is_hf_folder(path):
        return
    there = "is a file: name its folder" if path.exists() else "does not exist"
    if path.is_dir():
        there = f"lacks {CONFIG}" if not (path / CONFIG).is_file() else "holds no safetensors file"
        if any(path.glob("*.bin")):
            there += "; its .bin files are pickles and never read: convert them to safetensors"
    raise CheckpointError(
        f"a folder of Hugging Face must hold {CONFIG} and {WEIGHTS}, or {INDEX} and "
        f"the files that it names, got {path}, which {there}; name another by "
        f"checkpoint.initial_load_path, or write checkpoint.initial_load_in_hf = false for a "
        f"checkpoint of another kind"
    )


def _survey(
    path: Path, *, names: Names, blocks: Blocks | None, num_layers: int
) -> dict[str, StoredTensor]:
    places = _places(path)
    found: dict[Place, StoredTensor] = {}
    scales: dict[str, StoredTensor] = {}
    more: set[str] = set()
    for file in sorted(set(places.values())) or [WEIGHTS]:
        for name, (shape, dtype) in _read_header(path / file).items():
            if places.get(name, file) == file and not NO_WEIGHT.fullmatch(name):
                place = ours, _ = names.ours(name) or (name, None)
                if names.is_of_more_layers(name, num_layers=num_layers):
                    more.add(name)
                    continue
                if blocks is not None and name.endswith(SCALE):
                    scales[name] = StoredTensor(
                        name=name, shape=shape, dtype=dtype, head_dim=None, file=file
                    )
                    continue
                if place in found:
                    raise CheckpointError(
                        f"{path} must hold each parameter once, got '{ours}' as "
                        f"'{found[place].name}' and as '{name}'; get the folder again"
                    )
                found[place] = StoredTensor(
                    name=name, shape=shape, dtype=dtype, head_dim=names.head_dim(ours), file=file
                )
    here = {(tensor.name, tensor.file) for tensor in (*found.values(), *scales.values())}
    left = {place for place in places.items() if place[0] not in more} - here
    absent = [f"{name} in {file}" for name, file in sorted(left)]
    if absent := [text for text in absent if not NO_WEIGHT.match(text)]:
        raise CheckpointError(
            f"{path / INDEX} names what is not there: {summarize(absent)}; get the folder again"
        )
    if more:
        text = "%s has %d tensors of layers behind the last, as %s: they are not read"
        logger.info(text, path, len(more), min(more))
    if blocks is not None:
        found = attach_scales(path, found, scales, blocks=blocks)
    return stack(path, found)


def _places(path: Path) -> dict[str, str]:
    """Return the file of each tensor as the index says; nothing where there is but one file."""
    if (path / WEIGHTS).is_file():
        return {}
    places = read_json(path / INDEX)["weight_map"]
    wrong: list[Any] = [places]
    if isinstance(places, dict):
        # a plain name: nothing outside of the folder is opened
        wrong = [v for v in places.values() if not isinstance(v, str) or Path(v).name != v]
    if wrong or not places:
        raise CheckpointError(
            f"{path / INDEX} is damaged: weight_map must give a file beside it for each tensor, "
            f"got {str(wrong[0] if wrong else places)[:60]!r}; get it again"
        )
    return places


def _read_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Return shape and type of each tensor of a file."""
    try:
        check_is_file(file)
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: (tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read, it may be cut short: {reason(error)}; get it again"
        ) from error
