"""New rows of a vocabulary start near the mean of the stored rows.

Rows from the distribution of a new model have another length than trained ones, so their logits are
far off. transformers' resize_token_embeddings(mean_resizing=True) draws new rows from a normal
distribution with the mean of the stored rows and 1e-9 times their covariance. Here new row k is

    mean + sqrt(1e-9) (x - mean)

where x is stored row k of a fixed permutation of them: n new rows beside n stored ones have exactly
that mean and covariance, and no matrix of D x D numbers is made.

The mean is a sum of integers, multiples of 2^-32, so it does not depend on the order of additions.
The new rows are a function of the stored rows alone: every layout computes the same bits, and reads
the same bits from checkpoints that were saved in any layout.

Beside LoRA adapters only the new rows are trained (`train_new_rows`): the gradient of the stored
rows is set to zero, and the vocabulary has no weight decay. Checkpoints hold the number of rows of
the base, so that a resumed run freezes the same rows and an export of the adapter has the others.

Shapes: N stored rows, K new rows on this rank, D columns.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.reader import PieceReader
from torchtitan.checkpoint.source import Checkpoint, WeightSource
from torchtitan.checkpoint.state import VOCABULARY, RunState
from torchtitan.checkpoint.storage import STATE, read_state
from torchtitan.data.sampler import Permutation
from torchtitan.mesh.ranks import on_every_rank
from torchtitan.models.init import local_offsets, local_part
from torchtitan.models.interface import ModelParts

logger = logging.getLogger(__name__)
COVARIANCE_SCALE = 1e-9
"""Factor of the stored rows' covariance, as in transformers."""
BASE_ROWS = "base_rows"
"""Key in the state of the weights: the number of vocabulary rows of the base of an adapter."""
UNIT = 2.0**-32
"""The mean sums multiples of it."""
CHUNK = 1 << 20
"""Elements to read at a time."""


def num_stored_rows(reader: PieceReader, name: str) -> int:
    """Return the number of rows that are stored of a tensor."""
    return max(piece.offsets[0] + piece.sizes[0] for piece in reader.entries[name].chunks)


def fill_new_rows(
    into: Mapping[str, Tensor],
    *,
    may_grow: Collection[str],
    reader: PieceReader,
    group: dist.ProcessGroup | None,
) -> None:
    """Fill the rows of tensors that have more rows than are stored, in place. Collective.

    Args:
        into: Parameters of this rank by name, whole or sharded in any way.
        may_grow: Names of the tensors that may be stored with fewer rows.
        reader: Has read the stored rows.
        group: Ranks that read together. None: this process only.

    Raises:
        CheckpointError: A file is damaged, or a stored value is not finite or too large.
    """

    def fill() -> None:
        with closing(reader):
            for name in may_grow:
                if name in into:
                    _fill(name, into[name], reader=reader)

    on_every_rank(fill, group=group)


def _fill(name: str, tensor: Tensor, *, reader: PieceReader) -> None:
    num_stored, width = num_stored_rows(reader, name), tensor.shape[1]
    rows, columns = local_offsets(tensor)
    rows = rows // width
    is_new = rows >= num_stored
    if not is_new.any():
        return
    order = Permutation(num_stored, seed=0, epoch=0, source=0)
    picked_K = torch.tensor([order[int(row) % num_stored] for row in rows[is_new]])
    sum_D = torch.zeros(width, dtype=torch.int64)
    new_KD = torch.empty(len(picked_K), width, dtype=torch.float64)
    for top, left, part in _stored_parts(name, reader=reader):
        if not bool(part.abs().max() * num_stored < 2**63 * UNIT):  # also NaN
            raise CheckpointError(
                f"{reader.path}: new rows of '{name}' start from the mean of the stored ones, "
                f"which has an infinite or very large value"
            )
        right = left + part.shape[1]
        sum_D[left:right] += (part / UNIT).round().long().sum(0)
        here = (picked_K >= top) & (picked_K < top + len(part))
        new_KD[here, left:right] = part[picked_K[here] - top]
    mean_D = sum_D.double() * UNIT / num_stored
    new_KD = (new_KD - mean_D) * COVARIANCE_SCALE**0.5 + mean_D
    local = local_part(tensor)
    local[is_new.to(local.device)] = new_KD[:, columns].to(local)


def _stored_parts(name: str, *, reader: PieceReader) -> Iterator[tuple[int, int, Tensor]]:
    """Yield the stored numbers in float64, with the row and column where each part begins."""
    entry = reader.entries[name]
    for piece in entry.chunks:
        (top, left), (height, width) = piece.offsets, piece.sizes
        step = max(1, CHUNK // max(1, width))
        with reader.open_piece(MetadataIndex(name, piece.offsets)) as opened:
            for first in range(0, height if width else 0, step):
                last = min(first + step, height)
                part = torch.empty(last - first, width, dtype=entry.properties.dtype)
                reader.copy(opened, (slice(first, last), slice(0, width)), into=part)
                yield top + first, left, part.double()


def train_new_rows(state: RunState, *, parts: ModelParts, source: WeightSource) -> RunState:
    """Freeze the rows that the base has, and return the state, which records their number.

    Args:
        state: The run, with loaded weights.
        parts: This rank's parts of its model.
        source: What was loaded: weights with fewer rows, or a checkpoint that records the rows of
            its base. Collective over its ranks.

    Raises:
        CheckpointError: The record is not a number of rows.
    """
    shapes = source.shapes()
    [num_rows, *_] = next(shape for n in VOCABULARY if (shape := shapes.get(n)) is not None)
    if isinstance(source, Checkpoint):
        stored = source.state("model", types={BASE_ROWS: int})
        num_rows = stored.get(BASE_ROWS, num_rows)
    # of each part: a tied embedding's copy on the last stage adds its gradient to the first's
    for name, parameter in (named for part in parts for named in part.named_parameters()):
        if name in VOCABULARY and parameter.requires_grad:
            rows = local_offsets(parameter)[0] // parameter.shape[1]
            freeze = partial(_clear_gradient, num_rows=int((rows < num_rows).sum()))
            parameter.register_post_accumulate_grad_hook(freeze)
    logger.info(
        "The first %d rows of the vocabulary are frozen, those after them trained", num_rows
    )
    return replace(state, model_state={**state.model_state, BASE_ROWS: num_rows})


def _clear_gradient(parameter: Tensor, *, num_rows: int) -> None:
    """Set the gradient of the first rows of this rank to zero: a shard has rows in their order."""
    assert parameter.grad is not None
    local_part(parameter.grad)[:num_rows].zero_()


def stored_base_rows(checkpoint: Path) -> int | None:
    """Return the number of vocabulary rows of the base that a checkpoint records, None if none.

    Raises:
        CheckpointError: The record is damaged.
    """
    if not (checkpoint / "model" / STATE).is_file():
        return None
    return read_state(checkpoint, "model").check_types({BASE_ROWS: int}).get(BASE_ROWS)
