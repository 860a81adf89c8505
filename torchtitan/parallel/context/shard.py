"""A rank's part of each sequence: the tokens that the model sees, with labels and positions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from torchtitan.data.settings import TrainingConfig
from torchtitan.mesh.dims import Mesh
from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.interface import Documents
from torchtitan.parallel.execution import Batch

if TYPE_CHECKING:
    from torchtitan.parallel.context.layout import SequenceLayout


def build_shard(
    parallelism: ParallelismConfig, *, training: TrainingConfig, mesh: Mesh
) -> SequenceShard:
    """Build the `SequenceShard` of this rank."""
    layout = None
    if mesh.dims.cp > 1:
        from torchtitan.parallel.context.layout import SequenceLayout

        layout = SequenceLayout.from_config(parallelism)
    return SequenceShard(
        layout,
        rank=mesh.data.get_local_rank("cp"),
        attn_mask_type=training.attn_mask_type,
        reset_positions=training.reset_positions,
    )


class SequenceShard:
    """Cuts tokens, labels and positions to a rank's part of each sequence, only here.

    Without a `layout` this rank has the full sequence. Under `block_causal` tokens attend to their
    own document only; `reset_positions` counts positions from 0 in each document.
    """

    def __init__(
        self,
        layout: SequenceLayout | None,
        *,
        rank: int,
        attn_mask_type: Literal["causal", "block_causal"] = "causal",
        reset_positions: bool = False,
    ) -> None:
        self._layout, self._rank = layout, rank
        self._separates_documents = attn_mask_type == "block_causal"
        self._resets_positions = reset_positions

    def take(self, samples: Mapping[str, Tensor]) -> Batch:
        """Return the rank's part of full sequences: `tokens` and `labels`, int64 (B, S).

        If documents matter, samples have `document_lengths`, concatenated over all sequences. If
        they are padded, `length` is the number of tokens before the padding, int64 (B).
        """
        tokens_BS, labels_BS = samples["tokens"], samples["labels"]
        seq_len = tokens_BS.shape[1]
        documents = None
        if self._separates_documents or self._resets_positions:
            documents = Documents.from_flat(samples["document_lengths"], seq_len=seq_len)
        separated = documents if self._separates_documents else None
        token_indices = torch.arange(seq_len)
        if self._layout is not None:
            token_indices = self._layout.positions(self._rank, seq_len=seq_len, documents=separated)
        positions = token_indices
        if documents is not None and self._resets_positions:
            positions = _pick(documents.positions(), token_indices)
        lengths = samples.get("length")
        return Batch(
            tokens=_pick(tokens_BS, token_indices),
            labels=_pick(labels_BS, token_indices),
            positions=positions,
            documents=separated,
            token_indices=None if lengths is None else token_indices,
            lengths=lengths,
        )


def _pick(x_BS: Tensor, token_indices: Tensor) -> Tensor:
    """Select tokens by position: the same positions in each sequence, or one row for each."""
    if token_indices.shape[-1] == x_BS.shape[1]:
        return x_BS  # all tokens, in order, so that pinned memory stays pinned
    return (
        x_BS.index_select(1, token_indices)
        if token_indices.ndim == 1
        else torch.stack([x_S[i_S] for x_S, i_S in zip(x_BS, token_indices, strict=True)])
    )
