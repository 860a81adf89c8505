"""Opens a single file of weights, as torch.save writes it, by our names or Hugging Face's.

Such a file is a pickle, and is read as plain data: a file that names anything but tensors and
containers is refused before it runs. Its tensors are mapped, so that each rank reads only the
pieces of its own shards. Sizes that no shape shows, as the base of the rotation, are not in such a
file: they are those of model.flavor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.checkpoint.source import ALL, ParameterFilter, row_order
from torchtitan.checkpoint.state import EMBEDDING, OUTPUT
from torchtitan.checkpoint.stored import read_records
from torchtitan.hf.folder import NO_WEIGHT
from torchtitan.hf.names import Names, Place
from torchtitan.hf.read import DTYPES, HFWeights, Open, StoredTensor, check_fit, stack
from torchtitan.mesh.ranks import on_first_rank, reason
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec, RopeOrder

logger = logging.getLogger(__name__)
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BESIDE = ("rope.freqs", "freqs_cis")
"""Buffers in files of Meta and torchtitan, which follow from the sizes; those of Hugging Face are
`NO_WEIGHT`."""


def open_file(
    path: Path,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    filter: ParameterFilter = ALL,
    rope: Literal["auto", "interleaved", "halves"] = "auto",
    group: dist.ProcessGroup | None,
) -> HFWeights:
    """Compare a file's names and shapes with the model's on rank 0, and tell all ranks.

    `rope` is the order of the rows of wq and wk where the names are ours.

    Raises:
        CheckpointError: The file is missing, damaged or refused, or is of another model.
    """

    names = Names(spec.hf, architecture)

    @cache
    def order(theirs: bool) -> RopeOrder:
        # a file may be of this library too, of whose folders each says its order
        said: RopeOrder | None = "halves" if theirs else None
        return row_order(path, stated=said, setting=rope, spec=spec, may_assume=False)

    def survey() -> dict[str, StoredTensor]:
        tensors = map_file(path)
        places: dict[Place, StoredTensor] = {}
        for name, tensor in tensors.items():
            place = ours, _ = names.ours(name) or (name, None)
            theirs = name != ours  # a name that both have is ours
            if place in places:
                raise CheckpointError(
                    f"{path} must hold each parameter once, got '{ours}' as '{places[place].name}' "
                    f"and as '{name}'; save it by one kind of names alone"
                )
            rotary = names.head_dim(ours)
            places[place] = StoredTensor(
                name=name,
                shape=tuple(tensor.shape),
                dtype=_NAMES.get(tensor.dtype, str(tensor.dtype)),
                head_dim=None if rotary is None or order(theirs) == "interleaved" else rotary,
            )
        found = stack(path, places)
        if architecture.tie_embeddings and _holds_embedding_twice(tensors, found):
            del found[OUTPUT]
        check_fit(path, found, spec=spec, architecture=architecture, filter=filter)
        logger.info("%s has no sizes but shapes: the others are those of model.flavor", path)
        return found

    return HFWeights(
        path=path,
        tensors=on_first_rank(survey, group=group),
        filter=filter,
        group=group,
        open_tensor=_opener(path),
    )


def _holds_embedding_twice(
    tensors: Mapping[str, Tensor], found: Mapping[str, StoredTensor]
) -> bool:
    """Tell whether the head of a tied model was saved too, as Hugging Face models list it."""
    if OUTPUT not in found or EMBEDDING not in found:
        return False
    head, embedding = (tensors[found[name].name] for name in (OUTPUT, EMBEDDING))
    return torch.equal(head, embedding)


def _opener(file: Path) -> Open:
    mapped = cache(partial(map_file, file))  # when a tensor is read: DCP tells all ranks of errors

    @contextmanager
    def open_tensor(path: Path, stored: StoredTensor) -> Iterator[Any]:
        yield mapped()[stored.name]

    return open_tensor


def is_beside(name: object) -> bool:
    """Tell whether an entry is a buffer that follows from the sizes."""
    return name in BESIDE or (isinstance(name, str) and NO_WEIGHT.fullmatch(name) is not None)


def map_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by the names there, mapped."""
    try:
        check_is_file(path)
        with path.open("rb") as file:
            read_records(file)
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # what damaged bytes come to: KeyError, TypeError, struct.error ...
        raise CheckpointError(
            f"{path} cannot be read as weights that torch.save wrote, nothing in it was run: "
            f"{_refusal(error)}; get it again, or save the state_dict alone, in torch's format of "
            f"today"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    wrong = [content] if not isinstance(content, dict) or not content else []
    if isinstance(content, dict):
        content = {name: tensor for name, tensor in content.items() if not is_beside(name)}
        wrong += [
            entry
            for entry in content.items()
            if not (isinstance(entry[0], str) and _is_plain(entry[1]))
        ]
    if wrong:
        raise CheckpointError(
            f'{path} must hold dense tensors by name, alone or under "model", got '
            f"{str(wrong[0])[:60]}; save the model's state_dict"
        )
    return content


def _is_plain(value: object) -> bool:
    """Tell whether a value is a tensor whose elements lie in the file, one by one."""
    if not isinstance(value, Tensor) or value.is_nested:
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _refusal(error: Exception) -> str:
    # torch's text tells first how to run what is in the file all the same
    found = re.search(r"WeightsUnpickler error: (.+)", str(error))
    return reason(error) if found is None else found[1]
