"""Load the tensors of a component into those of a run, after comparing names, shapes and types."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint.reader import TensorReader, fill, is_tensor, paused_gc, read_metadata
from torchtitan.checkpoint.rows import HeadDim
from torchtitan.mesh.ranks import on_every_rank, on_first_rank, union

logger = logging.getLogger(__name__)
Shape = tuple[int, ...]
SKIP = (
    "use the model.flavor and training.dtype of the checkpoint, or name parameters to skip: "
    'checkpoint.exclude_from_loading = ["output.*"]'
)


def stored_shapes(
    checkpoint: Path, component: str, *, group: dist.ProcessGroup | None
) -> dict[str, Shape | None]:
    """Return the shapes of a component's entries by name; None for one that is not a tensor."""

    def shapes() -> dict[str, Shape | None]:
        stored = read_metadata(checkpoint / component).state_dict_metadata
        return {name: _shape_and_dtype(entry)[0] for name, entry in stored.items()}

    return on_first_rank(shapes, group=group)


def read_tensors(
    checkpoint: Path,
    component: str,
    *,
    into: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
    may_skip: Callable[[str], bool] = lambda name: True,
    accepts: Collection[str] = (),
    rope_head_dim: HeadDim = lambda name: None,
    remedy: str = SKIP,
) -> None:
    """Fill tensors in place from a component that any layout saved.

    Args:
        checkpoint: Folder of the checkpoint.
        component: Name of the component.
        into: Tensors to fill, by name.
        group: Ranks that load together. None: this process only.
        may_skip: Whether a stored tensor that is not in `into` may stay unread.
        accepts: Types to convert, e.g. torch.bfloat16. Others must be those of `into`.
        rope_head_dim: Head width of a tensor that is stored in the half-split order (`rows.py`),
            None if it has the interleaved order.
        remedy: What to do if names, shapes or types differ.

    Raises:
        CheckpointError: Names, shapes or types differ, or a file is missing, damaged or refused.
    """
    folder = checkpoint / component
    # names of all ranks: a pipeline stage has only some of the stored tensors
    wanted = union(
        {n: (tuple(t.shape), (str(t.dtype), *accepts)) for n, t in into.items()}, group=group
    )
    with paused_gc():
        metadata = on_first_rank(lambda: read_metadata(folder), group=group)
    readers: list[TensorReader] = []

    def open_component() -> None:
        reader = TensorReader(folder, metadata)
        reader.check_whole(into)
        stored = {name: _shape_and_dtype(entry) for name, entry in reader.entries.items()}
        check_match(folder, stored, wanted, may_skip=may_skip, remedy=remedy)
        reader.read_half_split_rope({name: rope_head_dim(name) for name in into})
        readers.append(reader)

    on_every_rank(open_component, group=group)
    fill(into, reader=readers[0], group=group)


def _shape_and_dtype(entry: Any) -> tuple[Shape | None, str]:
    if not is_tensor(entry):
        return None, "raw bytes"
    return tuple(entry.size), str(entry.properties.dtype)


def check_match(
    place: Path,
    stored: Mapping[str, tuple[Shape | None, str]],
    wanted: Mapping[str, tuple[Shape, Collection[str]]],
    *,
    may_skip: Callable[[str], bool],
    spell: Callable[[str], str] = repr,
    remedy: str = SKIP,
) -> None:
    """Check that stored tensors fit the wanted ones.

    Args:
        place: Folder of the stored tensors, for messages.
        stored: Shape (None for raw bytes) and type by name.
        wanted: Shape and accepted types by name.
        may_skip: Whether a stored tensor that is not wanted may stay unread.
        spell: Formats a name in messages.
        remedy: What to do if they do not fit.

    Raises:
        CheckpointError: Tensors are missing or unexpected, or have other shapes or types.
    """
    shapes, types = [], []
    for name in wanted.keys() & stored.keys():
        (shape, accepted), (stored_shape, dtype) = wanted[name], stored[name]
        if stored_shape is None:
            types.append(f"{spell(name)} is raw bytes, which are never loaded")
            continue
        if stored_shape != shape:
            shapes.append(f"{spell(name)} has shape {list(stored_shape)}, not {list(shape)}")
        if dtype not in accepted:
            types.append(f"{spell(name)} has type {dtype}, not {', '.join(accepted)}")
    mistakes = {
        "missing": [spell(n) for n in wanted if n not in stored],
        "unexpected": [spell(n) for n in stored if n not in wanted and not may_skip(n)],
        "of another shape": shapes,
        "of another type": types,
    }
    lines = [
        f"{len(names)} {kind}: {'; '.join(sorted(names)[:8])}" + (" ..." if len(names) > 8 else "")
        for kind, names in mistakes.items()
        if names
    ]
    if lines:
        raise CheckpointError(
            f"{place} does not fit this job, which reads {len(wanted)} tensors:\n  "
            + "\n  ".join(lines)
            + f"\n{remedy}"
        )
