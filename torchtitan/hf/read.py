"""Weights by Hugging Face's names as a source, read by each rank straight into its own shards."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.pieces import PieceReader, fill
from torchtitan.checkpoint.ranks import reason
from torchtitan.checkpoint.source import Selection
from torchtitan.hf.names import Names
from torchtitan.models.sizes import DecoderConfig
from torchtitan.models.spec import ModelSpec

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""Types of weights that can be read; quantised ones are not among them."""


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """One tensor on disk."""

    name: str
    """Its name there."""
    shape: tuple[int, ...]
    dtype: str
    """As safetensors calls it."""
    head_dim: int | None
    """Width of the heads whose rows lie in halves; None: they lie as ours."""
    file: str = ""
    """Its file in the folder."""


Open = Callable[[Path, StoredTensor], AbstractContextManager[Any]]
"""Opens a tensor below a path; slices of the result are tensors."""


@contextmanager
def open_slice(path: Path, stored: StoredTensor) -> Iterator[Any]:
    """Open a tensor of a folder."""
    try:
        # opened anew for each: what was read stays mapped, and counts as memory, until then
        with safe_open(path / stored.file, framework="pt") as opened:
            yield opened.get_slice(stored.name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path / stored.file} cannot be read: {reason(error)}") from error


@dataclass(frozen=True, kw_only=True)
class HFWeights:
    """Weights whose headers fit the job's model: a `WeightSource`."""

    path: Path
    tensors: Mapping[str, StoredTensor]
    """By our names; those that we have no name for, by theirs."""
    selection: Selection
    group: dist.ProcessGroup | None
    open_tensor: Open = open_slice

    def names(self) -> Collection[str]:
        """Return the names of all tensors."""
        return self.tensors.keys()

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Fill the selected parameters in place, each in its own type.

        Raises:
            CheckpointError: A file is missing or damaged.
        """
        wanted = self.selection.wanted(into, names=self.names)
        reader = _Reader(self)
        reader.grow({name: tensor.shape for name, tensor in wanted.items()})
        reader.turn_halves({name: tensor.head_dim for name, tensor in reader.stored.items()})
        fill(wanted, reader=reader, group=self.group)


class _Reader(PieceReader):
    """Each tensor is one piece."""

    def __init__(self, source: HFWeights) -> None:
        self.stored = {name: t for name, t in source.tensors.items() if t.dtype in DTYPES}
        self._open_tensor = source.open_tensor
        entries = {name: _as_one_piece(tensor) for name, tensor in self.stored.items()}
        places = {MetadataIndex(n, e.chunks[0].offsets): self.stored[n] for n, e in entries.items()}
        super().__init__(source.path, Metadata(dict(entries), storage_data=places))

    def open_piece(self, index: MetadataIndex) -> AbstractContextManager[Any]:
        """Open a tensor."""
        return self._open_tensor(Path(self.path), self.stored[index.fqn])


def _as_one_piece(tensor: StoredTensor) -> TensorStorageMetadata:
    shape = torch.Size(tensor.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
        size=shape,
        chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(shape)), sizes=shape)],
    )


def check_fit(
    path: Path,
    found: Mapping[str, StoredTensor],
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    selection: Selection,
) -> None:
    """Compare the selected names, shapes and types with those of the model."""
    names = Names(spec.hf, architecture)

    def both(name: str) -> str:
        # patterns go by our name, and a look into the folder by theirs
        theirs = found[name].name if name in found else names.theirs(name)
        return f"'{name}'" if name == theirs else f"'{name}' ({theirs})"

    storage.check_match(
        path,
        {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()},
        {
            name: (tuple(parameter.shape), DTYPES)
            for name, parameter in spec.build_meta(architecture).named_parameters()
            if not selection.leaves_out(name)
        },
        leaves_out=selection.leaves_out,
        may_grow=selection.may_grow,
        spell=both,
    )
