from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.models.fake_group import fake_group
from tests.models.reference import TINY, random_decoder, reference_config
from torchtitan.models.families import MODELS
from torchtitan.models.rope import build_rope, frequencies
from torchtitan.models.sizes import DecoderConfig, RopeScaling


@pytest.mark.promise("float64")
def test_rotation_is_that_of_complex_numbers_in_float64():
    positions = torch.tensor([0, 1, 2, 777, 131_071])
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    rope = build_rope(positions, head_dim=8, theta=10_000.0, scaling=None)
    freqs = 10_000.0 ** (-torch.arange(0, 4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones(5, 4).double(), positions[:, None] * freqs)
    expected = torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * turn[:, None]
    expected = torch.view_as_real(expected).flatten(-2).float()
    torch.testing.assert_close(*rope.rotate(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("width", [6, 10])
@pytest.mark.parametrize("compiled", [False, True])
def test_the_gradient_is_turned_back_in_float64(compiled, width):
    """Of the first channels. The others of a wider head are not changed."""
    rope = build_rope(torch.tensor([0, 3, 131_071]), head_dim=6, theta=10_000.0, scaling=None)
    given = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(2, 3, 5, width, generator=given) for _ in range(2))
    x.requires_grad_()
    rotate = torch.compile(rope.rotate, backend="eager") if compiled else rope.rotate
    (turned,) = rotate(x)
    turned.backward(grad)
    assert torch.equal(turned[..., 6:], x[..., 6:])
    back = torch.complex(rope.cos.double(), -rope.sin.double())[:, None]
    expected = torch.view_as_complex(grad[..., :6].double().unflatten(-1, (-1, 2))) * back
    expected = torch.cat((torch.view_as_real(expected).flatten(-2).float(), grad[..., 6:]), -1)
    torch.testing.assert_close(x.grad, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("start", [0, 1])
@pytest.mark.parametrize("heads", [1, 3])
def test_channels_that_begin_at_an_odd_place(start, heads):
    """Latent attention rotates a slice of each head, or of a latent that all heads share."""
    whole = torch.randn(2, 4, heads, 9, generator=torch.Generator().manual_seed(0))
    part = whole[..., start : start + 8]
    rope = build_rope(torch.arange(4), head_dim=8, theta=10_000.0, scaling=None)
    torch.testing.assert_close(
        *rope.rotate(part), *rope.rotate(part.clone(memory_format=torch.contiguous_format))
    )
    part.requires_grad_()
    # a gradient of a sum has no strides
    rope.rotate(part)[0].sum().backward()
    assert part.grad is not None


def assert_equal_to_the_public_rotation(config: DecoderConfig) -> None:
    # two heads of the right width are enough: frequencies know nothing else
    small = dataclasses.replace(config, dim=2 * config.head_width, num_heads=2, num_kv_heads=2)
    public = LlamaRotaryEmbedding(reference_config(small))
    freqs = frequencies(
        config.head_width,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
        device=torch.device("cpu"),
    )
    torch.testing.assert_close(freqs.float(), public.inv_freq, rtol=2e-6, atol=0)
    start = build_rope(
        torch.tensor([0]),
        head_dim=config.head_width,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
    )
    assert torch.equal(start.cos, torch.full_like(start.cos, public.attention_scaling))


@pytest.mark.parametrize("flavor", ["debugmodel", "1B", "8B", "405B"])
def test_frequencies_equal_the_public_ones(flavor):
    assert_equal_to_the_public_rotation(MODELS["llama3"].flavors[flavor])


@pytest.mark.promise("float64")
@pytest.mark.parametrize("head_dim", [8, 64, 128])
@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize(
    "scaling",
    [
        RopeScaling(type="linear", factor=1.0),
        RopeScaling(type="linear", factor=3.7),
        RopeScaling(
            type="llama3",
            factor=4.0,
            original_max_position=8192,
            low_freq_factor=2.0,
            high_freq_factor=3.0,
        ),
        RopeScaling(type="yarn", factor=1.0, original_max_position=4096),
        RopeScaling(type="yarn", factor=16.0, original_max_position=8192),
        RopeScaling(
            type="yarn", factor=40.0, original_max_position=4096, beta_fast=7.5, beta_slow=2.5
        ),
        RopeScaling(type="yarn", factor=4.0, original_max_position=8192, attention_factor=0.7),
        # one pair at both ends of the ramp
        RopeScaling(type="yarn", factor=4.0, original_max_position=7, beta_fast=1.3),
    ],
    ids=repr,
)
def test_each_scaling_equals_the_public_one(scaling, theta, head_dim):
    config = dataclasses.replace(TINY, dim=4 * head_dim, rope_theta=theta, rope_scaling=scaling)
    assert_equal_to_the_public_rotation(config)


def test_angles_stay_float32_under_fsdp_mixed_precision():
    seen = []
    model = random_decoder(TINY)
    for block in model.layers.values():
        block.attention.register_forward_pre_hook(
            lambda module, args: seen.append((args[0].dtype, args[1].cos.dtype))
        )
    with fake_group(rank=0, world_size=2):
        mesh = init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
        for module in (*model.layers.values(), model):
            fully_shard(module, mesh=mesh, mp_policy=policy)
        model(torch.zeros(1, 4, dtype=torch.int64))
    assert seen == [(torch.bfloat16, torch.float32)] * 2
