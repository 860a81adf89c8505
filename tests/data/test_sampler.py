"""The order of samples: permutations are one-to-one and random, mixtures keep their weights."""

from __future__ import annotations

import math
import tracemalloc
from collections import Counter
from fractions import Fraction

import pytest
from scipy import stats

from torchtitan.data.sampler import Inverse, Mixture, Permutation


def order(n: int, *, seed: int = 0, epoch: int = 0, source: int = 0) -> list[int]:
    permutation = Permutation(n, seed=seed, epoch=epoch, source=source)
    return [permutation[i] for i in range(n)]


@pytest.mark.promise("mixtures")
@pytest.mark.parametrize("n", [*range(1, 40), 63, 64, 65, 99, 100, 101, 255, 256, 257, 1000, 4567])
def test_each_number_once(n: int) -> None:
    for seed in range(3):
        numbers, inverse = order(n, seed=seed), Inverse(n, seed=seed, epoch=0, source=0)
        assert sorted(numbers) == [*range(n)] == [inverse[i] for i in numbers]


def test_seed_epoch_and_source_each_change_the_order() -> None:
    orders = [order(100), order(100, seed=1), order(100, epoch=1), order(100, source=1)]
    assert len(set(map(tuple, orders))) == 4
    assert order(100) == orders[0]


@pytest.mark.promise("mixtures")
@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_every_order_is_as_likely(n: int) -> None:
    num_orders = math.factorial(n)
    counts = Counter(tuple(order(n, seed=seed)) for seed in range(40 * num_orders))
    assert len(counts) == num_orders
    assert stats.chisquare(list(counts.values())).pvalue > 1e-4


@pytest.mark.promise("mixtures")
def test_huge_permutations_take_no_memory() -> None:
    tracemalloc.start()
    permutation = Permutation(10**15, seed=0, epoch=0, source=0)
    drawn = {permutation[i] for i in range(100)}
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(drawn) == 100
    assert max(drawn) < 10**15
    assert peak < 100_000


WEIGHTS = [
    (1.0,),
    (0.5, 0.5),
    (0.7, 0.3),
    (3.0, 2.0, 1.0),
    (0.9, 0.05, 0.03, 0.02),
    (1e-3, 1.0),
    (0.1, 0.2, 0.3, 0.4),
    (1.0,) * 7,
]


@pytest.mark.promise("mixtures")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_mixtures_keep_their_weights_in_every_prefix(weights: tuple[float, ...]) -> None:
    mixture = Mixture(weights)
    exact = [Fraction(str(weight)) for weight in weights]
    drawn = [0] * len(weights)
    for k in range(3000):
        draw = mixture[k]
        # each source's own samples are numbered without gaps
        assert draw.index == drawn[draw.source]
        drawn[draw.source] += 1
        for source, weight in enumerate(exact):
            assert mixture.count(source, first=k + 1) == drawn[source]
            limit = 2 if len(weights) <= 4 else 3
            assert abs(drawn[source] - (k + 1) * weight / sum(exact)) < limit


@pytest.mark.promise("mixtures")
@pytest.mark.parametrize("weights", WEIGHTS)
def test_exhaustion_is_the_first_time(weights: tuple[float, ...]) -> None:
    mixture = Mixture(weights)
    for source in range(len(weights)):
        for num_samples in (1, 2, 17, 1000):
            after = mixture.exhausted_after(source, num_samples=num_samples)
            assert mixture.count(source, first=after) == num_samples
            assert mixture.count(source, first=after - 1) == num_samples - 1


@pytest.mark.promise("mixtures")
def test_far_samples_are_as_exact_as_near_ones() -> None:
    mixture = Mixture((0.7, 0.3))
    for k in (10**15, 10**15 + 1, 10**15 + 9):
        draw = mixture[k]
        assert draw.index == mixture.count(draw.source, first=k)
        assert mixture.count(draw.source, first=k + 1) == draw.index + 1
