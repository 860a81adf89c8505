"""Parameter groups, and the update against the papers' formulas."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.rank_pool import RankPool
from torchtitan.optim.optimizer import (
    build_optimizer,
)
from torchtitan.optim.schedule import set_lr
from torchtitan.optim.settings import GroupConfig, OptimizerConfig


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


@pytest.mark.promise("optimizers")
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


@pytest.mark.promise("optimizers")
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


def rates_and_decays(settings: OptimizerConfig) -> dict[str, tuple[float, float]]:
    net = model()
    optimizer = build_optimizer(net, settings=settings)
    set_lr(optimizer, 0.5)
    found = {p: (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    return {name: found[p] for name, p in net.named_parameters()}


@pytest.mark.promise("optimizers")
def test_groups_have_rates_and_decays_of_their_own() -> None:
    """The first group that matches has a parameter; no_decay_params are decayed in none."""
    groups = (
        GroupConfig(params=("linear.w*",), lr=0.25),
        GroupConfig(params=("linear.*", "norm*"), weight_decay=0.7),
    )
    settings = OptimizerConfig(lr=1.0, weight_decay=0.3, groups=groups, no_decay_params=("norm*",))
    assert rates_and_decays(settings) == {
        "linear.weight": (0.125, 0.3),
        "linear.bias": (0.5, 0.7),
        "norm.weight": (0.5, 0.0),
    }


SHARDED = {"rows": Shard(0), "columns": Shard(1), "copied": Replicate(), "norm": Shard(0)}
SHAPES = {"rows": (5, 4), "columns": (3, 6), "copied": (3, 3), "norm": (5,)}
TORCHS: list[dict[str, Any]] = [
    {"name": "Adadelta", "options": {"rho": 0.8, "eps": 1e-3}},
    {"name": "Adagrad"},
    {"name": "Adam"},
    {"name": "AdamW", "options": {"amsgrad": True}},
    {"name": "AdamW", "implementation": "for-loop"},
    {"name": "Adamax"},
    {"name": "NAdam"},
    {"name": "RAdam"},
    {"name": "RMSprop", "options": {"momentum": 0.9, "centered": True}},
    {"name": "SGD", "momentum": 0.9, "options": {"nesterov": True}},
]


def gradients(step: int) -> dict[str, Tensor]:
    torch.manual_seed(step)
    return {name: torch.randn(shape) for name, shape in SHAPES.items()}


def updated(settings: dict[str, Any], *, sharded: bool) -> list[Tensor]:
    mesh = init_device_mesh("cpu", (2,)) if sharded else None

    def lay(name: str, value: Tensor) -> Tensor:
        if mesh is None:
            return value
        return distribute_tensor(value, mesh, [SHARDED[name]], src_data_rank=None)

    net = nn.ParameterDict({name: nn.Parameter(lay(name, x)) for name, x in gradients(0).items()})
    optimizer = build_optimizer(net, settings=OptimizerConfig(lr=0.1, **settings))
    for step in range(1, 7):  # RAdam begins to adapt at the sixth
        for name, grad in gradients(step).items():
            net[name].grad = lay(name, grad)
        optimizer.step()
    found = (p.detach() for p in net.values())
    return [p.full_tensor() if isinstance(p, DTensor) else p for p in found]


def all_updated() -> list[list[Tensor]]:
    return [updated(settings, sharded=True) for settings in TORCHS]


@pytest.mark.promise("optimizers")
@pytest.mark.slow
def test_torchs_optimizers_update_shards_as_whole_parameters(ranks: RankPool) -> None:
    for result in ranks.run(all_updated, world=2):
        for settings, found in zip(TORCHS, result, strict=True):
            expected = updated(settings, sharded=False)
            for ours, whole in zip(found, expected, strict=True):
                torch.testing.assert_close(ours, whole, atol=1e-6, rtol=1e-6, msg=str(settings))
