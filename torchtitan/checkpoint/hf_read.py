"""Weights of a Hugging Face folder, read by each rank straight into its own shards.

The usual ways read the whole model on every rank, or on one that sends it around. Here DCP plans
which piece of which tensor a rank needs, whatever the layout, and the rank reads that piece and
nothing else: there is never more of the files in its memory than one piece of one tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property
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
from torchtitan.checkpoint.hf import overlap
from torchtitan.checkpoint.hf_folder import DTYPES, HFFolder, StoredTensor
from torchtitan.checkpoint.pt_file import map_file
from torchtitan.checkpoint.ranks import reason
from torchtitan.checkpoint.settings import WEIGHT_FILES


def read_weights(
    folder: HFFolder, *, into: Mapping[str, Tensor], group: dist.ProcessGroup | None
) -> None:
    """Fill the tensors `into`, by our names, in place from a folder, each in its own type.

    `group` are the ranks that load together; None loads in this process alone.

    Raises:
        CheckpointError: A file is missing or damaged.
    """
    sizes = {name: tensor.shape for name, tensor in into.items()}
    is_file = folder.path.suffix in WEIGHT_FILES
    reader = FileReader(folder, sizes=sizes) if is_file else HFReader(folder, sizes=sizes)
    try:
        dcp.load(dict(into), storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:
        raise CheckpointError(f"{folder.path}: {storage.reasons(error)}") from error


class HFReader(dcp.StorageReader):
    """Gives DCP the pieces of tensors that it plans to load."""

    def __init__(self, folder: HFFolder, *, sizes: Mapping[str, torch.Size]) -> None:
        """`sizes` are those of the tensors to fill, which may have more rows than are stored."""
        self._folder = folder
        self._sizes = sizes

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Accept none: the folder is given when the reader is made."""
        return False

    def reset(self, checkpoint_id: Any = None) -> None:
        """Do nothing: there is no state between loads."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what headers told, each tensor as one piece."""
        return Metadata(
            {
                name: _as_one_piece(tensor, size=self._sizes.get(name))
                for name, tensor in self._folder.tensors.items()
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
        for item in plan.items:
            stored = self._folder.tensors[item.storage_index.fqn]
            file = self._folder.path / stored.file
            target = planner.resolve_tensor(item).detach()
            try:
                with self._opened(file, stored.name) as tensor:
                    for into, out_of in overlap(
                        item.storage_offsets,
                        item.lengths,
                        offsets=[0] * len(stored.shape),
                        sizes=stored.shape,
                        head_dim=stored.head_dim,
                    ):
                        target[into].copy_(tensor[out_of])
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{file} cannot be read: {reason(error)}") from error
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @contextmanager
    def _opened(self, file: Path, name: str) -> Iterator[Any]:
        # opened anew for each: what was read stays mapped, and counts as memory, until then
        with safe_open(file, framework="pt") as opened:
            yield opened.get_slice(name)


class FileReader(HFReader):
    """The same from a single file of torch's."""

    @cached_property
    def _tensors(self) -> dict[str, Tensor]:
        # when the first piece is read: DCP tells all ranks of an error there
        return map_file(self._folder.path)

    @contextmanager
    def _opened(self, file: Path, name: str) -> Iterator[Any]:
        yield self._tensors[name]


def _as_one_piece(tensor: StoredTensor, *, size: torch.Size | None) -> TensorStorageMetadata:
    """Say where a tensor lies; of a larger `size` the rest is not stored."""
    stored = torch.Size(tensor.shape)
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
        size=size or stored,
        chunks=[ChunkStorageMetadata(offsets=torch.Size([0] * len(stored)), sizes=stored)],
    )
