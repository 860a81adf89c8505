"""A validation in the account: with more tokens than a step it has the peak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tools.plan.jobs import planned
from tests.tools.plan.test_account import (
    DIM,
    HIDDEN,
    PARAMETERS,
    RECOMPUTED,
    SEQUENCE,
    TENSORS,
    VOCAB,
)
from torchtitan.tools.plan.account import Account, replay
from torchtitan.tools.plan.ranks import rehearse_rank

pytestmark = pytest.mark.slow

VALIDATES = "--validation.enable=true"
BATCH = "--validation.local_batch_size="
SMALL = 10240
"""Bytes of rotations of the 64 positions, and of scalars."""


def peak(account: Account) -> int:
    return sum(account.by_purpose.values())


@pytest.mark.parametrize(
    ("samples", "chunks", "is_head"),
    [(64, 0, True), (64, 2, True), (1024, 0, False)],
)
def test_more_tokens_make_the_peak(
    samples: int, chunks: int, is_head: bool, tmp_path: Path
) -> None:
    """The larger of the head, by the loss's code, and of a block, by the feed-forward's.

    A token of the head: its input, label and loss. Of a chunk beside them: logits in
    bfloat16 and float32, a label, a maximum, two sums, two losses, two masks and what the loss
    is made from. Of a block: the stream, what was added to it, its norm, three
    hidden products, and the label.
    """
    arguments = (RECOMPUTED, VALIDATES, f"--training.loss_chunks={chunks}")
    job = planned(tmp_path, *arguments, f"{BATCH}{samples}")
    account = replay(rehearse_rank(job, 0))
    tokens = samples * SEQUENCE
    few = 2**24 // VOCAB
    chunk = tokens // (chunks or 1) if chunks or tokens <= few else 512
    token = 2 * DIM + 8 + 4
    head = tokens * token + chunk * ((2 + 4) * VOCAB + 8 + 4 + 2 * 4 + 2 * 4 + 2 + 4)
    head += 2 * VOCAB * DIM  # its weight, in bfloat16
    block = tokens * (3 * 2 * DIM + 3 * 2 * HIDDEN + 8)
    assert (head > block) == is_head
    state = (4 + 8) * PARAMETERS + 4 * TENSORS
    assert 0 <= peak(account) - state - max(head, block) < SMALL
    assert account.piece[1:] == ("validation", None if is_head else 0)
