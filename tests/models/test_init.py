"""The generator: its distribution, its independence, and what must not touch its values."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats
import torch

from torchtitan.models.families import MODELS
from torchtitan.models.init import CUTOFF, fill_normal, initialize, local_offsets, make_key

N = 1 << 20
NAME = "layers.1.attention.wq.weight"
SPEC = MODELS["llama3"]


def draw(shape, *, std=1.0, name=NAME, seed=0, dtype=torch.float32, chunk=None):
    out = torch.full(shape, float("nan"), dtype=dtype)
    key = make_key(name, seed=seed)
    fill_normal(out, std=std, key=key, offsets=local_offsets(out), chunk=chunk)
    return out


@pytest.fixture(scope="module")
def sample():
    return draw((N,)).double()


@pytest.mark.promise("initial-weights")
def test_distribution_is_the_truncated_normal(sample):
    exact = scipy.stats.truncnorm(-CUTOFF, CUTOFF)
    assert scipy.stats.kstest(sample.numpy(), exact.cdf).pvalue > 1e-3
    moments = [float((sample**k).mean()) for k in (1, 2, 3, 4)]
    errors = [(exact.moment(2 * k) / N) ** 0.5 for k in (1, 2, 3, 4)]
    for k, moment, error in zip((1, 2, 3, 4), moments, errors, strict=True):
        assert abs(moment - exact.moment(k)) < 4 * error


@pytest.mark.promise("initial-weights")
def test_values_are_those_of_the_formula_in_float64():
    # the same recipe in numpy's unsigned integers and scipy's exact inverse
    unsigned = [np.uint64(half % 2**64) for half in make_key(NAME, seed=5)]
    z = np.arange(100_000, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) ^ unsigned[0]
    z = (z ^ z >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9) ^ unsigned[1]
    z = (z ^ z >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    x = (z.view(np.int64) >> 39 | 1) / 2**24
    expected = scipy.stats.truncnorm(-CUTOFF, CUTOFF).ppf((1 + x) / 2)
    np.testing.assert_allclose(draw((100_000,), seed=5).numpy(), expected, rtol=0, atol=1e-5)


def correlation(a, b):
    """In standard errors of independent samples."""
    a, b = a - a.mean(), b - b.mean()
    return float((a * b).mean() / (a.std() * b.std())) * len(a) ** 0.5


def joint_uniformity(a, b):
    """The p-value of a chi-square test over 64 x 64 equally likely cells."""
    below = float(torch.special.ndtr(torch.tensor(-CUTOFF, dtype=torch.float64)))
    cells = [((torch.special.ndtr(v) - below) / (1 - 2 * below) * 64).long() for v in (a, b)]
    counts = torch.bincount(cells[0] * 64 + cells[1], minlength=4096)
    return scipy.stats.chisquare(counts.numpy()).pvalue


def assert_independent(a, b):
    assert abs(correlation(a, b)) < 4.5
    assert abs(correlation(a.square(), b.square())) < 4.5
    assert joint_uniformity(a, b) > 1e-5


@pytest.mark.parametrize("lag", [1, 2, 3, 4, 64, 256, 4096, 65536, 1 << 19])
def test_neighbours_are_independent(sample, lag):
    assert_independent(sample[:-lag], sample[lag:])


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"seed": 1 << 40},
        {"name": "layers.2.attention.wq.weight"},
        {"name": "layers.1.attention.wk.weight"},
        {"name": "layers.11.attention.wq.weight"},
    ],
)
def test_seeds_and_parameters_are_independent(sample, change):
    assert_independent(sample, draw((N,), **change).double())


@pytest.mark.parametrize("shape", [(), (1,), (5,), (3, 1), (7, 129), (2, 3, 50)])
@pytest.mark.parametrize("chunk", [1, 7, 64, 128, 1 << 20])
def test_chunks_touch_no_value(shape, chunk):
    assert torch.equal(draw(shape, chunk=chunk), draw((1000,))[: int(np.prod(shape))].view(shape))


@pytest.mark.promise("initial-weights")
def test_any_box_is_the_slice_of_the_whole():
    shape = (37, 5, 41)
    whole = draw(shape)
    random = np.random.default_rng(0)
    for _ in range(60):
        low, high = np.sort(random.integers(0, np.add(shape, 1), (2, 3)), axis=0)
        box = tuple(slice(a, b) for a, b in zip(low, high, strict=True))
        offsets = [o[s] for o, s in zip(local_offsets(whole), box, strict=True)]
        out = torch.full(whole[box].shape, float("nan"))
        chunk = int(random.integers(1, 200))
        fill_normal(out, std=1.0, key=make_key(NAME, seed=0), offsets=offsets, chunk=chunk)
        assert torch.equal(out, whole[box])


@pytest.mark.promise("initial-weights")
def test_indices_beyond_32_bits_count():
    out, near = torch.empty(8), torch.empty(8)
    key = make_key(NAME, seed=0)
    fill_normal(out, std=1.0, key=key, offsets=[torch.arange(8) + (1 << 32)])
    fill_normal(near, std=1.0, key=key, offsets=[torch.arange(8)])
    assert not (out == near).any()


@pytest.mark.parametrize("tied", [False, True])
def test_each_parameter_starts_by_its_rule(tied):
    config = SPEC.flavors["1B" if tied else "8B"]
    small = type(config)(
        dim=256,
        num_layers=3,
        num_heads=4,
        num_kv_heads=2,
        hidden_dim=512,
        vocab_size=600,
        tie_embeddings=tied,
    )
    with torch.device("meta"):
        model = SPEC.build(small)
    model.to_empty(device="cpu")
    initialize(model, seed=7)
    std_of_truncated = scipy.stats.truncnorm(-CUTOFF, CUTOFF).std()
    # torchtitan's: depth-scaled where the residual stream is written, 1 and 1/sqrt(dim) at the ends
    expected = {"tok_embeddings": 0.02 if tied else 1.0, "output": 1 / 16}
    for i in range(3):
        for name in ("attention.wq", "attention.wk", "attention.wv", "feed_forward.w1"):
            expected[f"layers.{i}.{name}"] = 0.02
        for name in ("attention.wo", "feed_forward.w2", "feed_forward.w3"):
            expected[f"layers.{i}.{name}"] = 0.02 / (2 * (i + 1)) ** 0.5
    for name, parameter in model.named_parameters():
        if "norm" in name:
            assert (parameter == 1).all()
        else:
            std = expected[name.removesuffix(".weight")] * std_of_truncated
            assert (
                abs(float(parameter.detach().std()) / std - 1) < 4 / (2 * parameter.numel()) ** 0.5
            )
