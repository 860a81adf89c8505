"""Recomputation changes no number and no name, and takes place where it was asked for."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from torchtitan.models import MODELS, initialize
from torchtitan.models.decoder import Decoder
from torchtitan.parallel.activation import Mode, apply_activation_checkpointing


def tiny() -> Decoder:
    model = MODELS["llama3"].build(MODELS["llama3"].flavors["tiny"])
    initialize(model, seed=0)
    return model


def gradients(model: Decoder) -> dict[str, torch.Tensor]:
    tokens = torch.arange(24).view(2, 12)
    F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten(), reduction="sum").backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize(
    ("mode", "every", "recomputed"),
    [
        ("none", 1, []),
        ("full", 2, ["0", "1"]),
        ("selective", 1, ["0", "1"]),
        ("selective", 2, ["0"]),
    ],
)
def test_gradients_stay_and_the_right_blocks_run_twice(
    mode: Mode, every: int, recomputed: list[str]
) -> None:
    plain, model = tiny(), tiny()
    calls: list[str] = []
    for name, block in model.layers.items():
        block.attention.register_forward_hook(lambda *_, name=name: calls.append(name))
    apply_activation_checkpointing(model, mode=mode, every=every)
    expected, got = gradients(plain), gradients(model)
    assert list(got) == list(expected)
    assert all(torch.equal(got[name], expected[name]) for name in expected)
    assert sorted(calls) == sorted(["0", "1", *recomputed])
