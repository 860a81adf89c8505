"""Is this Hugging Face folder a model of this job? Told by headers alone, before any long work.

A safetensors file is a header in JSON and plain numbers: reading it runs nothing, and one that is
cut short is refused when it is opened. Rank 0 reads the headers and config.json, compares sizes,
names, shapes and types with the model's, and tells all ranks where each tensor lies.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.files import check_is_file, read_json
from torchtitan.checkpoint.hf import CONFIG, INDEX, WEIGHTS, head_dim_of_rows, our_name, their_name
from torchtitan.checkpoint.hf_config import (
    SEEN_IN_SHAPES,
    check_config,
    read_config,
    sizes_of,
    stored_sizes,
)
from torchtitan.checkpoint.ranks import on_first_rank, reason
from torchtitan.models.spec import DecoderConfig, HFFormat, ModelSpec

logger = logging.getLogger(__name__)
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of weights that are read; what is quantised is none of them."""
EMBEDDING, OUTPUT = "tok_embeddings.weight", "output.weight"
# a buffer that old versions of transformers saved; it follows from the sizes
NO_WEIGHT = re.compile(r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq\b.*")


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor of the folder."""

    file: str
    name: str
    """Theirs."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it."""
    head_dim: int | None
    """Width of the heads whose rows lie in another order than ours; None: they lie as ours do."""


@dataclass(frozen=True, kw_only=True)
class HFFolder:
    """A folder whose weights are those of the job, as far as headers tell."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    """By our names; what we have no name for, by theirs."""


def is_hf_folder(path: Path) -> bool:
    """Tell whether a folder looks like a model of Hugging Face."""
    return (path / CONFIG).is_file() and any((path / name).is_file() for name in (WEIGHTS, INDEX))


def open_folder(
    path: Path,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    exclude: Collection[str] = (),
    chosen: Collection[str] = (),
    grows_vocab: bool = False,
    group: dist.ProcessGroup | None,
) -> HFFolder:
    """Read the headers of a folder on rank 0, and tell all ranks.

    `exclude` are patterns of the parameters that are not loaded, `chosen` sizes in which the job is
    meant to differ. With `grows_vocab` the folder's vocabulary may be the smaller one.

    Raises:
        CheckpointError: It is no such folder, or a file of it is damaged, or it is of another model
            than `architecture`, a size of `spec`.
    """

    def survey() -> HFFolder:
        _check_is_folder(path)
        # with parameters left out, their names and shapes say more exactly what has to agree
        exempt = {*chosen, *(SEEN_IN_SHAPES if exclude else ())}
        config = read_config(path)
        if grows_vocab:
            exempt.add("vocab_size")
        check_config(config, spec=spec, architecture=architecture, seen_elsewhere=exempt)
        there, ours = stored_sizes(config), sizes_of(architecture)
        for name in sorted(chosen):
            if there[name] != ours[name]:
                text = "%s of the rotation: %s in %s, %s in this job"
                logger.info(text, name, there[name], config.path, ours[name])
        found = _survey(path, names=spec.hf, architecture=architecture)
        if stored_sizes(config)["tie_word_embeddings"]:
            # some writers save the tied head all the same, which transformers does not read either
            found.pop(OUTPUT, None)
        with torch.device("meta"):
            wanted = {n: tuple(p.shape) for n, p in spec.build(architecture).named_parameters()}
        compared = {**found, **(with_more_rows(path, found, wanted) if grows_vocab else {})}
        check_match(path, compared, wanted, names=spec.hf, exclude=exclude)
        return HFFolder(path=path, tensors=found)

    return on_first_rank(survey, group=group)


def with_more_rows(
    path: Path, found: Mapping[str, StoredTensor], wanted: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredTensor]:
    """Return embedding and head as if they had the rows that they lack."""
    grown = {}
    for name in wanted.keys() & found.keys() & {EMBEDDING, OUTPUT}:
        shape, there = wanted[name], found[name].shape
        if there[1:] == shape[1:] and there[0] < shape[0]:
            grown[name] = replace(found[name], shape=shape)
            storage.log_growth(path, name, there[0], shape[0])
    return grown


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


def _survey(path: Path, *, names: HFFormat, architecture: DecoderConfig) -> dict[str, StoredTensor]:
    places = _places(path)
    found: dict[str, StoredTensor] = {}
    for file in sorted(set(places.values())) or [WEIGHTS]:
        for name, (shape, dtype) in _read_header(path / file).items():
            if places.get(name, file) == file and not NO_WEIGHT.fullmatch(name):
                ours = our_name(name, names=names) or name
                if ours in found:
                    raise CheckpointError(
                        f"{path} must hold each parameter once, got '{ours}' as "
                        f"'{found[ours].name}' and as '{name}'; get the folder again"
                    )
                head_dim = head_dim_of_rows(ours, names=names, architecture=architecture)
                found[ours] = StoredTensor(
                    file=file, name=name, shape=shape, dtype=dtype, head_dim=head_dim
                )
    here = {(tensor.name, tensor.file) for tensor in found.values()}
    absent = [f"{name} in {file}" for name, file in sorted(places.items() - here)]
    if absent := [text for text in absent if not NO_WEIGHT.match(text)]:
        raise CheckpointError(
            f"{path / INDEX} names what is not there: {storage.summary(absent)}; get the folder "
            f"again"
        )
    return found


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
    """Return shape and type of each tensor of a file.

    Raises:
        CheckpointError: It is missing or damaged, or its size is not that of its tensors.
    """
    try:
        check_is_file(file)
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {n: (tuple(s.get_shape()), str(s.get_dtype())) for n, s in slices.items()}
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{file} cannot be read, it may be cut short: {reason(error)}; get it again"
        ) from error


def check_match(
    path: Path,
    found: Mapping[str, StoredTensor],
    wanted: Mapping[str, tuple[int, ...]],
    *,
    names: HFFormat,
    exclude: Collection[str],
) -> None:
    """Compare names, shapes and types."""

    def leaves_out(name: str) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in exclude)

    def both(name: str) -> str:
        # patterns go by our name, and a look into the folder by theirs
        theirs = found[name].name if name in found else their_name(name, names=names)
        return f"'{name}'" if name == theirs else f"'{name}' ({theirs})"

    common = [name for name in wanted if name in found and not leaves_out(name)]
    storage.raise_mismatch(
        f"{path} does not fit this job, whose model has {len(wanted)} parameters",
        {
            "missing": [both(n) for n in wanted if n not in found and not leaves_out(n)],
            "unexpected": [both(n) for n in found if n not in wanted and not leaves_out(n)],
            "of another shape": [
                f"{both(n)} has shape {list(found[n].shape)}, not {list(wanted[n])}"
                for n in common
                if found[n].shape != wanted[n]
            ],
            "of another type": [
                f"{both(n)} has type {found[n].dtype}, not {', '.join(DTYPES)}"
                for n in common
                if found[n].dtype not in DTYPES
            ],
        },
        remedy="use the model.flavor that has these sizes",
    )
