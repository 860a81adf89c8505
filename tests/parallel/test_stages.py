"""Cuts against brute force over all cuts and against torchtitan's, and what is refused."""

from __future__ import annotations

import itertools
from functools import cache

import pytest

from torchtitan.mesh.settings import ParallelismConfig
from torchtitan.models.families import MODELS
from torchtitan.models.interface import count
from torchtitan.parallel.pipeline.layout import (
    Costs,
    find_costs,
    name_modules,
    split_layers,
)

LLAMA3 = MODELS["llama3"]
COUNTS = count(LLAMA3.build_meta(LLAMA3.flavors["tiny8"]))


@cache
def all_cuts(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    """Return all cuts with a layer in each stage; if stages are more, both ends may have none."""
    least = 0 if num_stages > num_layers else 1
    ends = itertools.combinations_with_replacement(range(num_layers + 1), num_stages - 1)
    cuts = [tuple(b - a for a, b in itertools.pairwise((0, *end, num_layers))) for end in ends]
    return [cut for cut in cuts if min(cut[1:-1], default=1) and min(cut[0], cut[-1]) >= least]


def costs_of(counts: tuple[int, ...], costs: Costs) -> list[float]:
    each = costs.by_layer or (1.0,) * sum(counts)
    ends = list(itertools.accumulate(counts, initial=0))
    found = [sum(each[a:b]) for a, b in itertools.pairwise(ends)]
    found[0] += costs.embedding
    found[-1] += costs.head
    return found


@pytest.mark.promise("counted-messages")
@pytest.mark.parametrize("num_layers", [1, 2, 5, 8])
@pytest.mark.parametrize("head", [0.0, 0.3, 1.0, 2.2, 20.0])
@pytest.mark.parametrize("embedding", [0.0, 1.5])
@pytest.mark.parametrize("unequal", [False, True])
def test_no_cut_has_a_cheaper_costliest_stage_or_is_more_even(
    num_layers: int, head: float, embedding: float, unequal: bool
) -> None:
    by_layer = tuple(0.4 + i * i % 7 / 4 for i in range(num_layers)) if unequal else ()
    costs = Costs(embedding=embedding, head=head, by_layer=by_layer)
    for num_stages in range(1, num_layers + 3):
        found = split_layers(num_layers, num_stages=num_stages, costs=costs)
        assert found in all_cuts(num_layers, num_stages)
        every = [costs_of(counts, costs) for counts in all_cuts(num_layers, num_stages)]
        least = min(map(max, every))
        assert max(costs_of(found, costs)) == pytest.approx(least)
        squares = [sum(c * c for c in e) for e in every if max(e) <= least + 1e-9]
        assert sum(c * c for c in costs_of(found, costs)) == pytest.approx(min(squares))


def test_the_head_costs_what_it_multiplies() -> None:
    """tiny8 by hand: 4 query and key-value matrices, 3 of the feed-forward, 8 heads of 4."""
    weights = 2 * 32 * 32 + 2 * 32 * 16 + 3 * 32 * 96
    layer = 6 * weights + 12 * 8 * 4 * 64
    costs = find_costs(ParallelismConfig(), counts=COUNTS, num_layers=8, seq_len=64)
    assert costs.embedding == 0
    assert costs.head == pytest.approx(6 * 32 * 264 / layer)
    given = ParallelismConfig(
        pipeline_parallel_first_stage_less_layers=2, pipeline_parallel_last_stage_less_layers=3
    )
    assert find_costs(given, counts=COUNTS, num_layers=8, seq_len=64) == Costs(embedding=2, head=3)


def test_a_layer_with_experts_costs_what_a_token_meets() -> None:
    """tiny8 of Qwen3-MoE: heads of 6 channels, a dense layer of width 96, then 2 experts of 24."""
    spec = MODELS["qwen3_moe"]
    counts = count(spec.build_meta(spec.flavors["tiny8"]))
    attention = 2 * 32 * 48 + 2 * 32 * 24
    dense, sparse = attention + 3 * 32 * 96, attention + 3 * 32 * 24 * 2 + 32 * 8
    costs = find_costs(ParallelismConfig(), counts=counts, num_layers=8, seq_len=64)
    flops = [6 * n + 12 * 48 * 64 for n in (dense, *[sparse] * 7)]
    mean = sum(flops) / 8
    assert costs.by_layer == pytest.approx([n / mean for n in flops])


def test_modules_of_each_stage() -> None:
    assert name_modules((1, 2, 1)) == (
        ("tok_embeddings", "layers.0"),
        ("layers.1", "layers.2"),
        ("layers.3", "norm", "output"),
    )
