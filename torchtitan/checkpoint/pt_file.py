"""A single file of weights, as torch.save writes it: of this library's names, or Hugging Face's.

Such a file is a pickle, and is read as plain data alone: one that names anything but tensors and
containers is refused before it runs. Its tensors are mapped, so that each rank reads the pieces of
its own shards and nothing else. What it lacks are the sizes that no shape shows, as the base of the
rotation: those are taken from model.flavor unseen.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.files import check_is_file
from torchtitan.checkpoint.hf import head_dim_of_rows, our_name
from torchtitan.checkpoint.hf_folder import (
    DTYPES,
    EMBEDDING,
    NO_WEIGHT,
    OUTPUT,
    HFFolder,
    StoredTensor,
    check_match,
    with_more_rows,
)
from torchtitan.checkpoint.ranks import on_first_rank, reason
from torchtitan.models.spec import DecoderConfig, ModelSpec

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
    exclude: Collection[str] = (),
    grows_vocab: bool = False,
    rope: Literal["auto", "interleaved", "halves"] = "auto",
    group: dist.ProcessGroup | None,
) -> HFFolder:
    """Compare a file's names and shapes with the model's on rank 0, and tell all ranks.

    `rope` is how the rows of wq and wk lie where the names are ours.

    Raises:
        CheckpointError: The file is missing, damaged or refused, or is of another model.
    """

    def survey() -> HFFolder:
        tensors = map_file(path)
        found: dict[str, StoredTensor] = {}
        for name, tensor in tensors.items():
            translated = our_name(name, names=spec.hf)
            # a name that both have is ours
            theirs = translated is not None and name != translated
            ours = translated if translated is not None else name
            if ours in found:
                raise CheckpointError(
                    f"{path} must hold each parameter once, got '{ours}' as '{found[ours].name}' "
                    f"and as '{name}'; save it by one kind of names alone"
                )
            rotary = head_dim_of_rows(ours, names=spec.hf, architecture=architecture)
            if rotary is not None:
                _check_order(path, name, rope=rope, theirs=theirs, spec=spec)
            found[ours] = StoredTensor(
                file="",
                name=name,
                shape=tuple(tensor.shape),
                dtype=_NAMES.get(tensor.dtype, str(tensor.dtype)),
                head_dim=rotary if theirs or rope == "halves" else None,
            )
        if architecture.tie_embeddings and OUTPUT in found and EMBEDDING in found:
            head, embedding = (tensors[found[n].name] for n in (OUTPUT, EMBEDDING))
            if torch.equal(head, embedding):
                del found[OUTPUT]  # saved twice, as a model of Hugging Face says its own names
        with torch.device("meta"):
            wanted = {n: tuple(p.shape) for n, p in spec.build(architecture).named_parameters()}
        compared = {**found, **(with_more_rows(path, found, wanted) if grows_vocab else {})}
        check_match(path, compared, wanted, names=spec.hf, exclude=exclude)
        logger.info("%s says no sizes but shapes: the others are those of model.flavor", path)
        return HFFolder(path=path, tensors=found)

    return on_first_rank(survey, group=group)


def _check_order(path: Path, name: str, *, rope: str, theirs: bool, spec: ModelSpec) -> None:
    """Refuse rows whose order can only be guessed, or is known to be another one."""
    if theirs and rope == "interleaved":
        raise CheckpointError(
            f"checkpoint.initial_load_rope is for weights by this library's names, got "
            f"\"{rope}\" for {path}, whose '{name}' is Hugging Face's, in halves; remove it"
        )
    if not theirs and rope == "auto" and spec.torchtitan_rope != "interleaved":
        raise CheckpointError(
            f"{path} does not say how the rows of '{name}' lie: torchtitan 0.2 writes {spec.name} "
            f"in {spec.torchtitan_rope}, this library interleaved, by the same names; write "
            f'checkpoint.initial_load_rope = "{spec.torchtitan_rope}" or "interleaved"'
        )


def is_beside(name: object) -> bool:
    """Tell whether an entry is a buffer that follows from the sizes."""
    return name in BESIDE or (isinstance(name, str) and NO_WEIGHT.fullmatch(name) is not None)


def map_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by the names there, mapped.

    Raises:
        CheckpointError: It is missing, damaged or refused, or holds something else.
    """
    try:
        check_is_file(path)
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
