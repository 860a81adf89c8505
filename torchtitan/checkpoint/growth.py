"""New rows of a vocabulary start near the mean of the stored rows.

Rows from the distribution of a new model have another length than trained ones, so their logits are
far off. transformers' resize_token_embeddings(mean_resizing=True) draws new rows from a normal
distribution with the mean of the stored rows and 1e-9 times their covariance. Here new row k is

    mean + sqrt(1e-9) (x - mean)

where x is stored row k of a fixed permutation of them: n new rows beside n stored ones have exactly
that mean and covariance, and no matrix of D x D numbers is made.

The mean is a sum of integers, multiples of 2^-32, so it does not depend on the order of additions.
The new rows depend only on the stored rows: every layout computes the same bits, and reads
the same bits from checkpoints that were saved in any layout.

Shapes: N stored rows, K new rows on this rank, D columns.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import closing

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.reader import PieceReader
from torchtitan.data.sampler import Permutation
from torchtitan.mesh.ranks import on_every_rank
from torchtitan.models.init import local_offsets, local_part

COVARIANCE_SCALE = 1e-9
"""Factor of the stored rows' covariance, as in transformers."""
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
        into: Parameters of this rank by name, full or sharded in any way.
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
    """Yield the stored numbers in float64, with the first row and column of each part."""
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
