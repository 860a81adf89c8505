"""Open a single file of weights that torch.save wrote, under torchtitan's or Hugging Face's names.

The file is a pickle. It is read as plain data: a file that names anything but tensors and
containers is refused, and nothing in it is executed. Its tensors are memory-mapped, so that each
rank reads only its own shards. Sizes that no shape shows, such as the rope base, are not in the
file. They are those of model.flavor.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal
from zipfile import ZIP_STORED, ZipFile, is_zipfile

import torch
import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.base.files import check_is_file
from torchtitan.checkpoint.source import ALL, ParameterFilter, row_order
from torchtitan.checkpoint.state import EMBEDDING, OUTPUT
from torchtitan.hf.folder import ROPE_BUFFER
from torchtitan.hf.names import Names, Slot
from torchtitan.hf.weights import (
    DTYPES,
    HFWeights,
    OpenTensor,
    StoredTensor,
    add_once,
    check_match,
    stack_parts,
)
from torchtitan.mesh.ranks import on_first_rank, reason
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec, RopeOrder

logger = logging.getLogger(__name__)
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
BUFFERS = ("rope.freqs", "freqs_cis")
"""Buffers in files of Meta and torchtitan. They follow from the sizes and are not read."""


def open_file(
    path: Path,
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    filter: ParameterFilter = ALL,
    rope: Literal["auto", "interleaved", "halves"] = "auto",
    group: dist.ProcessGroup | None,
) -> HFWeights:
    """Open a file. Collective over `group`; None for this process only.

    Args:
        path: The file.
        spec: Family of the model.
        architecture: Sizes of the model.
        filter: Parameters to read.
        rope: Row order of wq and wk under torchtitan's names.
        group: Ranks that read together.

    Raises:
        CheckpointError: The file is missing, damaged or refused, or holds another model.
    """
    names = Names(spec.hf, architecture)

    @cache
    def order(is_hf_name: bool) -> RopeOrder:
        stated: RopeOrder | None = "halves" if is_hf_name else None
        return row_order(path, stated=stated, setting=rope, spec=spec, may_assume=False)

    def survey() -> dict[str, StoredTensor]:
        tensors = map_file(path)
        by_slot: dict[Slot, StoredTensor] = {}
        for name, tensor in tensors.items():
            slot = names.from_hf(name) or (name, None)
            head_dim = names.rope_head_dim(slot[0])
            # a name that both use is torchtitan's
            if head_dim is not None and order(name != slot[0]) == "interleaved":
                head_dim = None
            dtype = _DTYPE_NAMES.get(tensor.dtype, str(tensor.dtype))
            stored = StoredTensor(
                name=name, shape=tuple(tensor.shape), dtype=dtype, rope_head_dim=head_dim
            )
            add_once(by_slot, slot, stored, path=path)
        found = stack_parts(path, by_slot)
        if architecture.tie_embeddings and _has_tied_head(tensors, found):
            del found[OUTPUT]
        check_match(path, found, spec=spec, architecture=architecture, filter=filter)
        logger.info("%s has no sizes: they are those of model.flavor", path)
        return found

    tensors = on_first_rank(survey, group=group)
    opener = _opener(path)
    return HFWeights(path=path, tensors=tensors, filter=filter, group=group, open_tensor=opener)


def _has_tied_head(tensors: Mapping[str, Tensor], found: Mapping[str, StoredTensor]) -> bool:
    """Return whether the head of a tied model was saved again, as transformers' state_dict has it.

    A head with other values is an unexpected tensor.
    """
    if OUTPUT not in found or EMBEDDING not in found:
        return False
    head, embedding = (tensors[found[name].name] for name in (OUTPUT, EMBEDDING))
    return torch.equal(head, embedding)


def _opener(path: Path) -> OpenTensor:
    mapped = cache(partial(map_file, path))  # at the first read, where DCP reports errors of ranks

    @contextmanager
    def open_tensor(path: Path, stored: StoredTensor) -> Iterator[Any]:
        yield mapped()[stored.name]

    return open_tensor


def map_file(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, memory-mapped and without known buffers.

    Raises:
        CheckpointError: The file is missing, damaged or refused.
    """
    try:
        check_is_file(path)
        if is_zipfile(path):
            with ZipFile(path) as archive:
                if any(record.compress_type != ZIP_STORED for record in archive.infolist()):
                    raise CheckpointError("its records are compressed")  # mmap would misread them
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except Exception as error:  # damaged bytes raise KeyError, TypeError, struct.error ...
        raise CheckpointError(
            f"{path} cannot be read, nothing in it was run: {_refusal(error)}; save only the "
            f"state_dict, with torch.save"
        ) from error
    if isinstance(content, dict) and isinstance(content.get("model"), dict):
        content = content["model"]
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if not _is_buffer(name)}
        wrong = [[name, value] for name, value in content.items() if not _is_weight(name, value)]
    if not isinstance(content, dict) or not content or wrong:
        got = wrong[0] if isinstance(content, dict) and wrong else content
        raise CheckpointError(
            f'{path} must hold dense tensors by name, at the top or under "model", got '
            f"{str(got)[:60]}"
        )
    return content


def _is_buffer(name: object) -> bool:
    return name in BUFFERS or (isinstance(name, str) and bool(ROPE_BUFFER.fullmatch(name)))


def _is_weight(name: object, value: object) -> bool:
    """Return whether an entry is a named tensor whose elements are stored one by one."""
    if not isinstance(name, str) or not isinstance(value, Tensor) or value.is_nested:
        return False
    return value.layout == torch.strided and value.device.type == "cpu"


def _refusal(error: Exception) -> str:
    # torch's message first explains how to execute the file nevertheless
    found = re.search(r"WeightsUnpickler error: (.+)", str(error))
    return reason(error) if found is None else found[1]
