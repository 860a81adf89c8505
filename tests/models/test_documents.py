"""Documents by their lengths."""

from __future__ import annotations

import pytest
import torch

from torchtitan.models.interface import Documents


def test_lengths_are_dealt_out_to_sequences() -> None:
    documents = Documents.from_flat(torch.tensor([3, 1, 4, 8, 1, 7]), seq_len=8)
    assert documents.lengths == ((3, 1, 4), (8,), (1, 7))
    assert documents[1:].lengths == ((8,), (1, 7))
    assert list(documents.bounds(0)) == [(0, 3), (3, 4), (4, 8)]
    assert documents.positions().tolist() == [
        [0, 1, 2, 0, 0, 1, 2, 3],
        [0, 1, 2, 3, 4, 5, 6, 7],
        [0, 0, 1, 2, 3, 4, 5, 6],
    ]


@pytest.mark.parametrize("lengths", [[3, 6], [8, 4], [8, 0]])
def test_a_document_neither_crosses_sequences_nor_is_empty(lengths: list[int]) -> None:
    with pytest.raises(AssertionError):
        Documents.from_flat(torch.tensor(lengths), seq_len=8)
