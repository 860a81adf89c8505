from __future__ import annotations

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.reference import VARIANTS, random_decoder
from torchtitan.models import MODELS, flops_per_token, num_parameters

LLAMA3 = MODELS["llama3"]

# from the public checkpoints
PUBLISHED = {
    "1B": 1_235_814_400,
    "3B": 3_212_749_824,
    "8B": 8_030_261_248,
    "70B": 70_553_706_496,
    "405B": 405_853_388_800,
}


@pytest.mark.parametrize("flavor", LLAMA3.flavors)
def test_parameters_are_those_of_the_module(flavor):
    config = LLAMA3.flavors[flavor]
    with torch.device("meta"):
        model = LLAMA3.build(config)
    assert num_parameters(config) == sum(p.numel() for p in model.parameters())
    assert num_parameters(config) == PUBLISHED.get(flavor, num_parameters(config))


@pytest.mark.parametrize("variant", VARIANTS)
def test_flops_are_those_of_forward_and_backward(variant):
    config = VARIANTS[variant]
    model = random_decoder(config)
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    # the unfused kernel: two whole S x S products forward and four backward, as PaLM counts
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * flops_per_token(config, 48)


def test_sizes_that_do_not_fit_together_are_refused():
    with pytest.raises(AssertionError):
        type(LLAMA3.flavors["tiny"])(
            dim=32, num_layers=1, num_heads=4, num_kv_heads=3, hidden_dim=8, vocab_size=8
        )
