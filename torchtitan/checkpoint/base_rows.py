"""Beside LoRA adapters, of a vocabulary that grew only the new rows are trained.

The gradient of the base's rows is set to zero, and the vocabulary has no weight decay. Checkpoints
hold the number of rows of the base, so that a resumed run freezes the same rows and an export of
the adapter has the trained ones.
"""

from __future__ import annotations

import logging
from dataclasses import replace
from functools import partial
from pathlib import Path

from torch import Tensor

from torchtitan.checkpoint.source import Checkpoint, WeightSource
from torchtitan.checkpoint.state import VOCABULARY, RunState
from torchtitan.checkpoint.storage import STATE, read_state
from torchtitan.mesh.ranks import on_first_rank
from torchtitan.models.init import local_offsets, local_part
from torchtitan.models.interface import ModelParts

logger = logging.getLogger(__name__)
BASE_ROWS = "base_rows"
"""Key in the state of the weights: the number of vocabulary rows of the base of an adapter."""


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


def keep_base_rows(state: RunState, *, source: WeightSource) -> RunState:
    """Return the state with the number of the base's rows that `source` records, if it does.

    So the export of an adapter has the rows that an earlier run added, also if this one trains none
    of them.
    """
    if not isinstance(source, Checkpoint):
        return state
    path = source.path
    num_rows = on_first_rank(lambda: stored_base_rows(path), group=source.group)
    if num_rows is None:
        return state
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
