"""Step counts are one scalar in a checkpoint where all parameters agree."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.distributed.rank_pool import RankPool
from torchtitan.checkpoint.state import merge_steps


def merge(counts_of_ranks: list[dict[str, float]]) -> dict[str, float]:
    counts = counts_of_ranks[dist.get_rank()]
    tensors = {f"{name}.step": torch.tensor(count) for name, count in counts.items()}
    return {name: t.item() for name, t in merge_steps(tensors).items()}


@pytest.mark.parametrize(
    ("counts", "merged"),
    [
        ([{"a": 3.0, "b": 3.0}, {"c": 3.0}], [{"step": 3.0}] * 2),
        ([{"a": 3.0}, {}], [{"step": 3.0}] * 2),
        ([{"a": 3.0, "b": 3.0}, {"c": 2.0}], [{"a.step": 3.0, "b.step": 3.0}, {"c.step": 2.0}]),
        ([{"a": 3.0, "b": 1.0}, {"c": 3.0}], [{"a.step": 3.0, "b.step": 1.0}, {"c.step": 3.0}]),
        ([{}, {}], [{}, {}]),
    ],
)
def test_counts_that_agree_on_all_ranks_are_one(
    counts: list[dict[str, float]], merged: list[dict[str, float]], ranks: RankPool
) -> None:
    assert ranks.run(merge, counts, world=2) == merged
