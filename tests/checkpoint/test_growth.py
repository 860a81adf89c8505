"""New rows of a vocabulary: mean and covariance of the stored rows, in any order of reading."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

from torchtitan.base.errors import CheckpointError
from torchtitan.checkpoint import growth
from torchtitan.checkpoint.growth import COVARIANCE_SCALE
from torchtitan.checkpoint.load import read_tensors

NAME = "tok_embeddings.weight"


def grow(stored: Tensor, num_rows: int, folder: Path) -> Tensor:
    """Store a tensor and read it into one with more rows, of the same type."""
    dcp.save({NAME: stored}, checkpoint_id=folder / "model", no_dist=True)
    grown = torch.zeros(num_rows, stored.shape[1], dtype=stored.dtype)
    read_tensors(folder, "model", into={NAME: grown}, group=None, may_grow=(NAME, "output.weight"))
    assert torch.equal(grown[: len(stored)], stored)
    return grown[len(stored) :]


def covariance(rows: Tensor) -> Tensor:
    return torch.cov(rows.T, correction=0)


@pytest.mark.promise("new-rows")
@pytest.mark.parametrize("center", [0.0, 0.7])
def test_as_many_new_rows_have_mean_and_covariance_of_the_stored(
    center: float, tmp_path: Path
) -> None:
    mixing = torch.tensor([[1.0, 0.5, 0.0], [0.0, 0.2, -0.3], [0.0, 0.0, 0.01]])
    stored = (torch.randn(57, 3, generator=torch.Generator().manual_seed(0)) @ mixing).double()
    new = grow(stored + center, 114, tmp_path)
    torch.testing.assert_close(new.mean(0), stored.mean(0) + center, rtol=1e-9, atol=1e-10)
    expected = COVARIANCE_SCALE * covariance(stored)
    torch.testing.assert_close(covariance(new), expected, rtol=1e-6, atol=1e-18)
    assert len(new.unique(dim=0)) == 57


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_neither_the_number_of_new_rows_nor_the_way_of_reading_moves_a_bit(
    dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = torch.randn(40, 5, generator=torch.Generator().manual_seed(1)).to(dtype)
    new = grow(stored, 99, tmp_path / "a")
    monkeypatch.setattr(growth, "CHUNK", 13)
    assert torch.equal(grow(stored, 51, tmp_path / "b"), new[:11])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e10])
def test_stored_rows_without_a_mean_are_refused(value: float, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=NAME):
        grow(torch.full((2, 3), value), 3, tmp_path)
