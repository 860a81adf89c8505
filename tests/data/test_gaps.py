"""Samples that are left out: all others keep their order, in any layout and over a restart."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.data.helpers import dataset_of, loader_of, rows
from torchtitan.data.sampler import SkippedSamples


def test_places_and_numbers_are_those_of_a_list() -> None:
    draw = random.Random(3)
    for _ in range(200):
        cuts = sorted(draw.sample(range(60), k=2 * draw.randrange(5)))
        ranges = list(zip(cuts[::2], cuts[1::2], strict=True))
        left_out = {k for first, last in ranges for k in range(first, last + 1)}
        kept = [k for k in range(80) if k not in left_out]
        skipped = SkippedSamples(ranges)
        assert [skipped.number_at(place) for place in range(len(kept))] == kept
        assert [skipped.offset_of(k) for k in range(80)] == [
            sum(i < k for i in kept) for k in range(80)
        ]
        assert {k for k in range(80) if skipped.holds(k)} == left_out


@pytest.mark.parametrize(("degree", "batch", "accumulation"), [(1, 8, 1), (2, 2, 2), (4, 1, 2)])
def test_the_others_keep_their_order(
    tmp_path: Path, degree: int, batch: int, accumulation: int
) -> None:
    dataset = dataset_of(tmp_path, num_epochs=1)
    order = [rows([{k: v[None] for k, v in dataset[i].items()}])[0] for i in range(60)]
    asked = {"batch": batch, "accumulation": accumulation, "degree": degree}
    first = [loader_of(dataset, rank=rank, **asked) for rank in range(degree)]  # type: ignore[arg-type]
    seen = {row for loader in first for _ in range(2) for row in rows(next(loader))}
    state = first[0].state_dict()
    assert state["position"] == 16
    # ranges before the position, over it, and behind it: what is past is not read again
    skipped = SkippedSamples([(2, 3), (15, 18), (30, 40)])
    then = [loader_of(dataset, rank=rank, skipped=skipped, **asked) for rank in range(degree)]  # type: ignore[arg-type]
    for loader in then:
        loader.load_state_dict(state)
    again = {row for loader in then for _ in range(3) for row in rows(next(loader))}
    assert seen == set(order[:16])
    assert again == set(order[19:30] + order[41:54])
    assert {loader.position for loader in then} == {54}
