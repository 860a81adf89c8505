"""Experts against a loop over tokens in float64, and the bugs that others had, planted."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.models.reference import EXPERTS, random_decoder, reference_of
from torchtitan.models import moe
from torchtitan.models.moe import Experts, MoE, Router
from torchtitan.models.sizes import MoEConfig

SIGMOID = dataclasses.replace(
    EXPERTS, expert_score="sigmoid", expert_weight_scale=2.5, num_experts_per_token=3
)
CONFIGS = {
    "softmax": EXPERTS,
    "not normed": dataclasses.replace(EXPERTS, norm_expert_weights=False),
    "one of many": dataclasses.replace(EXPERTS, num_experts_per_token=1, norm_expert_weights=False),
    "all": dataclasses.replace(EXPERTS, num_experts_per_token=5),
    "more experts than tokens": dataclasses.replace(EXPERTS, num_experts=40),
    "sigmoid, scaled": SIGMOID,
}


def some(config: MoEConfig, dtype: torch.dtype = torch.float64) -> tuple[MoE, Tensor]:
    generator = torch.Generator().manual_seed(3)
    layer = MoE(config).to(dtype)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(std=0.3, generator=generator)
    return layer, torch.randn(2, 9, config.dim, dtype=dtype, generator=generator)


def token_by_token(layer: MoE, x_BSC: Tensor, config: MoEConfig) -> Tensor:
    """The definition, by plain indexing."""
    out = []
    for x_C in x_BSC.flatten(0, 1):
        logits_E = layer.router.gate.weight @ x_C
        is_softmax = config.expert_score == "softmax"
        scores_E = logits_E.softmax(0) if is_softmax else logits_E.sigmoid()
        chosen = scores_E.argsort(descending=True)[: config.num_experts_per_token].tolist()
        total = sum(scores_E[e] for e in chosen) if config.norm_expert_weights else 1.0
        experts = layer.experts
        out.append(
            sum(
                config.expert_weight_scale
                * (scores_E[e] / total)
                * (experts.w2[e] @ (F.silu(experts.w1[e] @ x_C) * (experts.w3[e] @ x_C)))
                for e in chosen
            )
        )
    return torch.stack(out).view_as(x_BSC)  # type: ignore[arg-type]


Run = Callable[[MoE, Tensor], Tensor]


def gradients(run: Run, layer: MoE, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of every parameter."""
    x, names = x.clone().requires_grad_(), [name for name, _ in layer.named_parameters()]
    out = run(layer, x)
    towards = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    found = torch.autograd.grad(out, [x, *layer.parameters()], towards, allow_unused=True)
    zeros = (torch.zeros_like(p) for p in [x, *layer.parameters()])
    whole = [z if one is None else one for one, z in zip(found, zeros, strict=True)]
    return {"out": out.detach(), **dict(zip(["x", *names], whole, strict=True))}


def differing(config: MoEConfig, rtol: float = 1e-12) -> set[str]:
    layer, x = some(config)
    expected = gradients(lambda layer, x: token_by_token(layer, x, config), layer, x)
    found = gradients(lambda layer, x: layer(x), layer, x)
    return {n for n, e in expected.items() if (found[n] - e).norm() > rtol * e.norm()}


@pytest.mark.promise("experts")
@pytest.mark.parametrize("name", CONFIGS)
def test_experts_are_what_the_definition_says(name: str) -> None:
    assert differing(CONFIGS[name]) == set()


def in_the_wrong_order(self: Experts, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Each choice is weighed by another one's weight."""
    return CORRECT_EXPERTS(self, x_TC, ids_TK, weights_TK.flip(-1))


def combined_by_expert(self: Experts, x_TC: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """The results are not brought back from the order of the experts."""
    with pytest.MonkeyPatch.context() as patch:
        plain = moe.combine
        patch.setattr(moe, "combine", lambda x, w, *_: plain(x, w, *[torch.arange(len(x))] * 2))
        return CORRECT_EXPERTS(self, x_TC, ids_TK, weights_TK)


def unnormed(self: Router, x_TC: Tensor, _: None = None) -> tuple[Tensor, Tensor]:
    ids_TK, weights_TK = CORRECT_ROUTER(self, x_TC)
    return ids_TK, self.gate(x_TC).softmax(-1).gather(-1, ids_TK) + 0 * weights_TK


def without_gradient(self: Router, x_TC: Tensor, _: None = None) -> tuple[Tensor, Tensor]:
    ids_TK, weights_TK = CORRECT_ROUTER(self, x_TC)
    return ids_TK, weights_TK.detach()


CORRECT_EXPERTS, CORRECT_ROUTER = Experts.forward, Router.forward


@pytest.mark.promise("experts", "oracles-can-fail")
@pytest.mark.parametrize(
    ("owner", "planted", "seen"),
    [
        (Experts, in_the_wrong_order, {"out", "x", "router.gate.weight", "experts.w2"}),
        (Experts, combined_by_expert, {"out", "x", "router.gate.weight", "experts.w2"}),
        (Router, unnormed, {"out", "x", "router.gate.weight", "experts.w2"}),
        (Router, without_gradient, {"x", "router.gate.weight"}),
    ],
)
def test_a_planted_bug_is_seen(
    owner: type, planted: object, seen: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "forward", planted)
    found = differing(EXPERTS, rtol=1e-3)
    assert seen <= found
    if planted is without_gradient:  # its forward shows nothing
        assert "out" not in found


@pytest.mark.promise("experts")
def test_every_gradient_is_that_of_transformers() -> None:
    model = random_decoder(EXPERTS)
    reference = reference_of(model)
    tokens = torch.arange(60).reshape(2, 30)
    for one in (model(tokens), reference(tokens).logits):
        one.square().mean().backward()
    own = dict(model.named_parameters())
    for number, layer in enumerate(reference.model.layers):
        name = f"layers.{number}.moe"
        w1, w3 = layer.mlp.experts.gate_up_proj.grad.chunk(2, dim=1)
        theirs = {
            f"{name}.experts.w1": w1,
            f"{name}.experts.w2": layer.mlp.experts.down_proj.grad,
            f"{name}.experts.w3": w3,
            f"{name}.router.gate.weight": layer.mlp.gate.weight.grad,
        }
        for key, wanted in theirs.items():
            grad = own[key].grad
            assert grad is not None
            assert (grad - wanted).norm() <= 1e-5 * wanted.norm(), key


@pytest.mark.promise("experts")
def test_of_equal_scores_the_lower_index_is_chosen() -> None:
    layer, x = some(dataclasses.replace(EXPERTS, num_experts=64, num_experts_per_token=4))
    layer.router.gate.weight.data.zero_()
    ids, weights = layer.router(x)
    assert ids.flatten(0, 1).tolist() == [[0, 1, 2, 3]] * 18
    assert weights.flatten(0, 1).tolist() == [[0.25] * 4] * 18
    layer.router.gate.weight.data[[9, 40]] = 1.0  # these tie with each other, above or below all
    ids, _ = layer.router(x)
    above = x.sum(-1) > 0
    assert ids[above].tolist() == [[9, 40, 0, 1]] * int(above.sum())
    assert ids[~above].tolist() == [[0, 1, 2, 3]] * int((~above).sum())


@pytest.mark.promise("same-bits")
def test_the_same_input_gives_the_same_bits() -> None:
    layer, x = some(EXPERTS, torch.float32)
    once, again = (gradients(lambda layer, x: layer(x), layer, x) for _ in range(2))
    assert all(torch.equal(once[name], again[name]) for name in once)


@pytest.mark.promise("bfloat16")
def test_scores_are_float32_in_bfloat16_too() -> None:
    layer, x = some(EXPERTS, torch.bfloat16)
    _, weights = layer.router(x)
    assert weights.dtype == torch.float32
    assert layer(x).dtype == torch.bfloat16
    # a float32 weight is rounded as FSDP would round it: the same choices in every layout
    wide = MoE(EXPERTS)
    wide.load_state_dict(layer.state_dict())
    wide.router.gate.weight.data.mul_(1 + 2**-12)
    assert torch.equal(wide.router(x)[1], weights)
    assert torch.equal(wide(x), layer(x))


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The branches of a GPU, with a CPU's product under the name of the one that it lacks."""
    monkeypatch.setattr(moe, "has_row_kernels", lambda rows: rows.dtype == torch.bfloat16)
    with torch.library._scoped_library("aten", "IMPL") as library:
        library.impl("bmm.dtype", lambda x, y, out_dtype: x.to(out_dtype) @ y.to(out_dtype), "CPU")
        yield


def errors_in_bfloat16(config: MoEConfig) -> dict[str, float]:
    """The distances from float64, from the same numbers of bfloat16, of a router in float32."""
    layer, x = some(config, torch.bfloat16)
    exact, _ = some(config)
    exact.load_state_dict(layer.state_dict())
    found = gradients(lambda layer, x: layer(x), layer, x)
    expected = gradients(lambda layer, x: layer(x), exact, x.double())
    return {n: float((found[n] - e).norm() / e.norm()) for n, e in expected.items()}


@pytest.mark.parametrize("name", CONFIGS)
def test_kernels_of_a_gpu_lose_no_more_than_copies_in_float32(
    name: str, request: pytest.FixtureRequest
) -> None:
    copied = errors_in_bfloat16(CONFIGS[name])
    request.getfixturevalue("kernels")
    found = errors_in_bfloat16(CONFIGS[name])
    assert max(found.values()) < 0.05
    assert {n for n, error in found.items() if error > 1.05 * copied[n]} == set()


@pytest.mark.promise("same-bits")
def test_nothing_is_added_up_by_scattering() -> None:
    """Its order would be left to chance on a GPU."""
    layer, x = some(EXPERTS, torch.float32)
    with torch.profiler.profile() as profile:
        gradients(lambda layer, x: layer(x), layer, x)
    names = {event.key for event in profile.key_averages()}
    assert "aten::index" in names
    assert not {name for name in names if "index_put" in name or "index_add" in name}
