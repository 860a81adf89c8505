from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tests.models.fake_group import fake_group
from tests.models.reference import TINY, random_decoder, reference_config
from torchtitan.models import MODELS
from torchtitan.models.rope import build_rope, frequencies


def test_rotation_is_that_of_complex_numbers_in_float64():
    positions = torch.tensor([0, 1, 2, 777, 131_071])
    x = torch.randn(2, 5, 3, 8, generator=torch.Generator().manual_seed(0))
    rope = build_rope(positions, head_dim=8, theta=10_000.0, scaling=None)
    freqs = 10_000.0 ** (-torch.arange(0, 4, dtype=torch.float64) / 4)
    turn = torch.polar(torch.ones(5, 4).double(), positions[:, None] * freqs)
    expected = torch.view_as_complex(x.double().unflatten(-1, (4, 2))) * turn[:, None]
    expected = torch.view_as_real(expected).flatten(-2).float()
    torch.testing.assert_close(rope.rotate(x), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("flavor", ["debugmodel", "1B", "8B", "405B"])
def test_frequencies_equal_the_public_ones(flavor):
    config = MODELS["llama3"].flavors[flavor]
    # two heads of the right width are enough: frequencies know nothing else
    small = dataclasses.replace(config, dim=2 * config.head_dim, num_heads=2, num_kv_heads=2)
    expected = LlamaRotaryEmbedding(reference_config(small)).inv_freq
    freqs = frequencies(
        config.head_dim,
        theta=config.rope_theta,
        scaling=config.rope_scaling,
        device=torch.device("cpu"),
    )
    torch.testing.assert_close(freqs.float(), expected, rtol=1e-5, atol=0)


def test_dtype_of_queries_stays():
    rope = build_rope(torch.arange(4), head_dim=8, theta=10_000.0, scaling=None)
    assert rope.rotate(torch.ones(1, 4, 2, 8, dtype=torch.bfloat16)).dtype == torch.bfloat16


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
