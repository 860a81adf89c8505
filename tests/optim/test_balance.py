"""Balancing against the formulas in float64, written out token by token."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.distributed.rank_pool import RankPool
from tests.models.reference import EXPERTS
from torchtitan.models.moe import MoE
from torchtitan.models.sizes import MoEConfig
from torchtitan.optim import balance as module
from torchtitan.optim.balance import Balance
from torchtitan.optim.settings import RouterConfig

BIASED = replace(EXPERTS, expert_bias=True)
SIGMOID = replace(BIASED, expert_score="sigmoid", num_experts_per_token=3)
RATE = 0.01
FINITE = torch.tensor(1.0)


def layers(*configs: MoEConfig) -> dict[str, MoE]:
    generator = torch.Generator().manual_seed(3)
    made = {f"layers.{number}.moe": MoE(config) for number, config in enumerate(configs)}
    for layer in made.values():
        layer.double()
        for name, parameter in layer.named_parameters():
            if name != "expert_bias":
                parameter.data.normal_(std=0.3, generator=generator)
        if layer.expert_bias is not None:
            layer.expert_bias.data = torch.zeros(layer.experts.w1.shape[0])
    return made


def follow(routes: dict[str, MoE], **settings: Any) -> Balance:
    return Balance(
        RouterConfig(**settings),
        routes=routes,
        num_experts={name: len(layer.experts.w1) for name, layer in routes.items()},
        groups=[],
        tp=(0, 1),
        device=torch.device("cpu"),
    )


def batches(num_steps: int) -> Iterator[list[Tensor]]:
    """Two microbatches a step."""
    generator = torch.Generator().manual_seed(5)
    for _ in range(num_steps):
        yield [
            torch.randn(2, 9, EXPERTS.dim, dtype=torch.float64, generator=generator)
            for _ in range(2)
        ]


def choices(layer: MoE, x_BSC: Tensor) -> list[list[int]]:
    """The experts of each token, by sorting its biased scores in Python."""
    found = []
    for x_C in x_BSC.flatten(0, 1):
        logits = layer.router.gate.weight.detach() @ x_C
        scores = logits.softmax(0) if layer.router.is_softmax else logits.sigmoid()
        if layer.expert_bias is not None:
            scores = scores + layer.expert_bias
        order = sorted(range(len(scores)), key=lambda i: -float(scores[i]))
        found.append(order[: layer.experts.num_chosen])
    return found


def counts_of(layer: MoE, xs: list[Tensor]) -> list[int]:
    flat = [expert for x in xs for token in choices(layer, x) for expert in token]
    return [flat.count(expert) for expert in range(len(layer.experts.w1))]


MIXED = (BIASED, EXPERTS, replace(SIGMOID, num_experts=7))
"""The second has no bias, and the third more experts."""


def biases_off() -> list[str]:
    """Train biases by `Balance`, and say which layers differ from sums of signs."""
    routes = layers(*MIXED)
    expected = {name: [0] * len(layer.experts.w1) for name, layer in routes.items()}
    wrong = set()
    balance = follow(routes, bias_update_rate=RATE)
    for number, xs in enumerate(batches(12)):
        counts = {name: counts_of(layer, xs) for name, layer in routes.items()}
        balance.begin(torch.tensor(7))
        for x in xs:
            for layer in routes.values():
                layer(x)
                with torch.no_grad():
                    layer(-x)
        balance.update(norm=torch.tensor(math.inf) if number == 5 else FINITE)
        if number == 5:
            continue
        for name, layer in routes.items():
            found = balance._last_LE[list(routes).index(name)].tolist()
            if found[: len(counts[name])] != counts[name] or any(found[len(counts[name]) :]):
                wrong.add(f"counts of {name}")
            if layer.expert_bias is None:
                continue
            total, size = sum(counts[name]), len(counts[name])
            for expert, n in enumerate(counts[name]):
                expected[name][expert] += (total > n * size) - (total < n * size)
            moves = layer.expert_bias.double() / RATE
            if moves.round().tolist() != expected[name]:
                wrong.add(name)
            assert layer.expert_bias.dtype == torch.float32
            assert (moves - moves.round()).abs().max() < 1e-4
    assert any(any(moves) for moves in expected.values())
    return sorted(wrong)


@pytest.mark.promise("balance")
def test_biases_are_sums_of_signs(ranks: RankPool) -> None:
    """With one step that is not taken, and layers seen without gradients in between."""
    assert ranks.run(biases_off, world=1) == [[]]


# --- losses

DIVISOR = 13
WEIGHTS = {"sequence_loss_weight": 0.3, "global_loss_weight": 0.7, "z_loss_weight": 0.11}
BEFORE = [7, 0, 11, 2, 20]


def plain_losses(layer: MoE, x_BSC: Tensor) -> dict[str, Tensor]:
    """The formulas, sequence by sequence and token by token."""
    router, num = layer.router, len(layer.experts.w1)
    losses = {name: torch.zeros((), dtype=torch.float64) for name in module.LOSSES}
    for x_SC in x_BSC:
        chosen = [i for token in choices(layer, x_SC[None]) for i in token]
        for x_C in x_SC:
            logits_E = router.gate.weight @ x_C
            scores_E = F.softmax(logits_E, 0) if router.is_softmax else logits_E.sigmoid()
            for i, share in enumerate(scores_E / scores_E.sum()):
                f = num * chosen.count(i) / (layer.experts.num_chosen * len(x_SC))
                losses["sequence_loss"] = losses["sequence_loss"] + 0.3 / DIVISOR * f * share
                f = num * BEFORE[i] / sum(BEFORE)
                losses["global_loss"] = losses["global_loss"] + 0.7 / DIVISOR * f * share
            z = logits_E.exp().sum().log()
            losses["z_loss"] = losses["z_loss"] + 0.11 / DIVISOR * z * z
    return losses


def differing(config: MoEConfig, used: tuple[str, ...]) -> set[str]:
    """Compare gradients and figures with those of the plain formulas, and name what differs."""
    [layer] = layers(config).values()
    layer.expert_bias = torch.nn.Parameter(torch.linspace(-0.1, 0.2, 5), requires_grad=False)
    [xs] = batches(1)
    names = [name for name, p in layer.named_parameters() if p.requires_grad]
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def model_loss(x: Tensor) -> Tensor:
        return layer(x).mul(torch.linspace(-1, 1, x.numel()).view_as(x)).sum() / DIVISOR

    inputs = [x.clone().requires_grad_() for x in xs]
    plain = [plain_losses(layer, x) for x in inputs]
    whole = sum(
        model_loss(x) + sum(losses[one] for one in used)
        for x, losses in zip(inputs, plain, strict=True)
    )
    expected = torch.autograd.grad(whole, [*inputs, *parameters])
    balance = follow({"a": layer}, **{f"{one}_weight": WEIGHTS[f"{one}_weight"] for one in used})
    balance._last_LE.copy_(torch.tensor([BEFORE]))
    balance.begin(torch.tensor(DIVISOR))
    inputs = [x.clone().requires_grad_() for x in xs]
    for x in inputs:
        model_loss(x).backward()
    balance.update(norm=FINITE)
    found = [one.grad for one in (*inputs, *parameters)]
    wrong = {
        name
        for name, a, b in zip(["x", "x", *names], found, expected, strict=True)
        if a is None or not torch.allclose(a, b, rtol=1e-10, atol=1e-12)
    }
    for one in used:
        value = sum(float(losses[one]) for losses in plain)
        if balance.figures()[f"router/{one}"].item() != pytest.approx(value, rel=1e-6):
            wrong.add(one)
    assert {key for key in balance.figures() if "loss" in key} == {f"router/{one}" for one in used}
    return wrong


@pytest.mark.promise("balance")
@pytest.mark.parametrize("used", [(), *((one,) for one in module.LOSSES), module.LOSSES])
@pytest.mark.parametrize("config", [BIASED, replace(SIGMOID, num_experts=5)])
def test_losses_and_their_gradients(
    config: MoEConfig, used: tuple[str, ...], ranks: RankPool
) -> None:
    assert ranks.run(differing, config, used, world=1) == [set()]


# --- figures


def figures_of(counts: list[list[int]]) -> dict[str, Any]:
    """What is reported of choices of one expert a token, of layers of four and three experts."""
    configs = (replace(BIASED, num_experts=4), replace(BIASED, num_experts=3))
    balance = follow(layers(*configs), log_layers=True)
    balance.begin(torch.tensor(1))
    for row, numbers in enumerate(counts):
        ids = torch.tensor([i for i, number in enumerate(numbers) for _ in range(number)])
        scores = torch.full((1, len(ids), len(numbers)), 2.0)
        balance._count(row, scores, ids[None, :, None])
    balance.update(norm=FINITE)
    return {name: value.tolist() for name, value in balance.figures().items()}


@pytest.mark.promise("balance")
def test_figures(ranks: RankPool) -> None:
    """Of the choices of both ranks."""
    found, same = ranks.run(figures_of, [[6, 0, 3, 3], [4, 4, 4]], world=2)
    assert found == same
    entropy = (math.log(4) + math.log(3)) / 2
    assert found == {
        "router/load_max_over_mean": 2.0,
        "router/dead_experts": pytest.approx(1 / 7),
        "router/entropy": pytest.approx(entropy),
        "router/load_max_over_mean/layers.0.moe": 2.0,
        "router/entropy/layers.0.moe": pytest.approx(math.log(4)),
        "router/counts/layers.0.moe": [12, 0, 6, 6],
        "router/load_max_over_mean/layers.1.moe": 1.0,
        "router/entropy/layers.1.moe": pytest.approx(math.log(3)),
        "router/counts/layers.1.moe": [8, 8, 8],
    }
