"""Parameter groups, and the update against the papers' formulas."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from torchtitan.optim.optimizer import build_optimizer
from torchtitan.optim.settings import OptimizerConfig


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict({"linear": nn.Linear(3, 2), "norm": nn.RMSNorm(3)})


def test_norms_and_biases_are_not_decayed() -> None:
    net = model()
    optimizer = build_optimizer(net, settings=OptimizerConfig(weight_decay=0.3))
    decay = {
        id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]
    }
    assert {name: decay[id(p)] for name, p in net.named_parameters()} == {
        "linear.weight": 0.3,
        "linear.bias": 0.0,
        "norm.weight": 0.0,
    }


def test_patterns_are_the_users() -> None:
    settings = OptimizerConfig(no_decay_params=("linear.*",))
    optimizer = build_optimizer(model(), settings=settings)
    assert [len(group["params"]) for group in optimizer.param_groups] == [1, 2]


@pytest.mark.parametrize("implementation", ["for-loop", "foreach", "fused"])
def test_adamw_follows_its_paper(implementation: str) -> None:
    """Decoupled weight decay, arXiv 1711.05101, algorithm 2, in float64."""
    net = model()
    settings = OptimizerConfig(
        lr=0.1, weight_decay=0.2, beta1=0.8, beta2=0.9, implementation=implementation
    )
    optimizer = build_optimizer(net, settings=settings)
    p = net["linear"].weight
    x = p.detach().double()
    m, v = torch.zeros_like(x), torch.zeros_like(x)
    for t in range(1, 4):
        gradient = torch.full_like(p, 0.5 * t)
        for q in net.parameters():
            q.grad = torch.full_like(q, 0.5 * t)
        optimizer.step()
        g = gradient.double()
        m, v = 0.8 * m + 0.2 * g, 0.9 * v + 0.1 * g * g
        x = x - 0.1 * (m / (1 - 0.8**t)) / ((v / (1 - 0.9**t)).sqrt() + 1e-8) - 0.1 * 0.2 * x
    torch.testing.assert_close(p.detach().double(), x, rtol=1e-6, atol=1e-7)


def test_sgd_with_momentum_follows_its_formula() -> None:
    net = model()
    settings = OptimizerConfig(name="SGD", lr=0.1, momentum=0.9, weight_decay=0.0)
    optimizer = build_optimizer(net, settings=settings)
    p = net["norm"].weight
    start, velocity, total = p.detach().clone(), 0.0, 0.0
    for _ in range(3):
        for q in net.parameters():
            q.grad = torch.ones_like(q)
        optimizer.step()
        velocity = 0.9 * velocity + 1.0
        total += 0.1 * velocity
    torch.testing.assert_close(p.detach(), start - total)


def test_frozen_parameters_are_left_out() -> None:
    net = model()
    net["linear"].requires_grad_(False)
    optimizer = build_optimizer(net, settings=OptimizerConfig())
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 1
