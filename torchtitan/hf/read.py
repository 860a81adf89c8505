"""Weights by Hugging Face's names as a source, read by each rank straight into its own shards.

Common loaders read the whole model on every rank, or on one that sends it around. Here DCP plans
which piece of which tensor a rank needs in any layout, and the rank reads only those pieces, so it
never holds more of a file than one piece of one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.futures import Future

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import storage
from torchtitan.checkpoint.ranks import reason
from torchtitan.checkpoint.rows import overlap
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
    # opened anew for each: what was read stays mapped, and counts as memory, until then
    with safe_open(path / stored.file, framework="pt") as opened:
        yield opened.get_slice(stored.name)


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
        group = self.group
        reader = _Reader(self, sizes={name: tensor.shape for name, tensor in wanted.items()})
        try:
            dcp.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
        except CheckpointException as error:
            raise CheckpointError(f"{self.path}: {storage.reasons(error)}") from error


class _Reader(dcp.StorageReader):
    """Gives DCP the pieces of tensors that it plans to load."""

    def __init__(self, source: HFWeights, *, sizes: Mapping[str, torch.Size]) -> None:
        """`sizes` are those of the tensors to fill, which may have more rows than are stored."""
        self._source = source
        self._sizes = sizes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept none: the source is given when the reader is made."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the headers say, each tensor as one piece."""
        return Metadata(
            {
                name: _as_one_piece(tensor, size=self._sizes.get(name))
                for name, tensor in self._source.tensors.items()
                if tensor.dtype in DTYPES
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, *args: Any, **kwargs: Any) -> None:
        """Do nothing: files are opened when they are read."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Leave this rank's plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Leave all plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read what `plan` asks for.

        Raises:
            CheckpointError: Names the file that is missing or damaged.
        """
        source = self._source
        for item in plan.items:
            stored = source.tensors[item.storage_index.fqn]
            target = planner.resolve_tensor(item).detach()
            try:
                with source.open_tensor(source.path, stored) as tensor:
                    for into, out_of in overlap(
                        item.storage_offsets,
                        item.lengths,
                        offsets=[0] * len(stored.shape),
                        sizes=stored.shape,
                        head_dim=stored.head_dim,
                    ):
                        target[into].copy_(tensor[out_of])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"{source.path / stored.file} cannot be read: {reason(error)}"
                ) from error
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done


def _as_one_piece(tensor: StoredTensor, *, size: torch.Size | None) -> TensorStorageMetadata:
    """Describe where a tensor lies; of a larger `size` the rest is not stored."""
    stored = torch.Size(tensor.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
        size=size or stored,
        chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(stored)), sizes=stored)],
    )


def check_fit(
    path: Path,
    found: Mapping[str, StoredTensor],
    *,
    spec: ModelSpec,
    architecture: DecoderConfig,
    selection: Selection,
) -> None:
    """Compare the selected names, shapes and types with those of the model.

    Raises:
        CheckpointError: Lists what differs.
    """
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
