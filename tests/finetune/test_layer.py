"""Adapters: the model they start from, and gradients by float64 autograd of W + s B A."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch.func import functional_call

from tests.models.fake_group import fake_group
from tests.models.reference import VARIANTS, random_decoder
from torchtitan.base.errors import ConfigError
from torchtitan.finetune.lora import (
    ADAPTERS,
    LoRALinear,
    apply_lora,
    check_special_rows,
    is_adapter,
    linear_names,
    merged,
)
from torchtitan.finetune.settings import LoRAConfig
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.models.interface import TrainableParams

ALL = ["layers.*.attention.w*", "layers.*.feed_forward.w*"]
TOKENS = torch.arange(40).reshape(2, 20) * 7 % 263


def adapted(model: Decoder, patterns: list[str] = ALL) -> Decoder:
    model.initial = MODELS["llama3"].build(model.config).initial
    settings = LoRAConfig(rank=3, alpha=6.0, modules=tuple(patterns))
    apply_lora(model, settings=settings, names=MODELS["llama3"].hf.names)
    return model


@pytest.mark.promise("lora")
def test_it_starts_as_the_model_it_is_put_into_bit_for_bit() -> None:
    spec = MODELS["llama3"]
    plain = spec.build(spec.flavors["tiny"])
    initialize(plain, seed=0)
    model = adapted(spec.build(spec.flavors["tiny"]))
    initialize(model, seed=0)
    assert {n for n, _ in model.named_parameters() if not is_adapter(n)} == {
        n for n, _ in plain.named_parameters()
    }
    assert torch.equal(model(TOKENS), plain(TOKENS))
    for module in model.modules():
        if isinstance(module, LoRALinear):
            # the variance of uniform numbers within 1 / sqrt(in)
            assert module.lora_a.std().item() == pytest.approx(
                (3 * module.in_features) ** -0.5, rel=0.3
            )
            assert not module.lora_b.any()
    a = model.layers["0"].attention
    assert not torch.equal(a.wq.lora_a, a.wk.lora_a)


@pytest.mark.promise("lora")
@pytest.mark.parametrize("variant", ["grouped", "biased"])
def test_loss_and_gradients_are_those_of_the_product_added_to_the_weight(variant: str) -> None:
    model = adapted(random_decoder(VARIANTS[variant])).double()
    torch.manual_seed(0)
    for name, p in model.named_parameters():
        if is_adapter(name):
            torch.nn.init.normal_(p, std=0.1)
    plain = Decoder(model.config).double()
    factors = {n: p for n, p in model.named_parameters() if is_adapter(n)}
    weights = {n: p for n, p in model.named_parameters() if not is_adapter(n)}
    for name in linear_names(plain):
        if name != "output":
            a, b = factors[f"{name}.lora_a"], factors[f"{name}.lora_b"]
            weights[f"{name}.weight"] = weights[f"{name}.weight"] + 6.0 / 3 * b @ a
            whole = merged(model.get_submodule(name).weight, a, b, scale=2.0)
            torch.testing.assert_close(whole, weights[f"{name}.weight"])
    found, expected = model(TOKENS), functional_call(plain, weights, TOKENS)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
    ours = torch.autograd.grad(found.square().mean(), list(factors.values()))
    theirs = torch.autograd.grad(expected.square().mean(), list(factors.values()))
    for name, grad, other in zip(factors, ours, theirs, strict=True):
        assert other.norm() > 0, name
        torch.testing.assert_close(grad, other, rtol=1e-7, atol=1e-10)


@pytest.mark.promise("lora")
@pytest.mark.parametrize(
    ("modules", "count"),
    [
        (("layers.*.wq",), 2),
        (("q_proj", "self_attn.v_proj"), 4),
        (("q_proj", "layers.0.*.wq", "down_proj"), 4),
        (("all-linear",), 14),
    ],
)
def test_names_of_layers(modules: tuple[str, ...], count: int) -> None:
    spec = MODELS["llama3"]
    model = spec.build(spec.flavors["tiny"])
    apply_lora(model, settings=LoRAConfig(rank=2, modules=modules), names=spec.hf.names)
    assert sum(isinstance(module, LoRALinear) for module in model.modules()) == count
    for wrong in ((), ("proj",), ("q_proj", "lm_head")):
        with pytest.raises(ConfigError):
            apply_lora(model, settings=LoRAConfig(rank=2, modules=wrong), names=spec.hf.names)


def test_patterns_choose_what_is_trained() -> None:
    names = ["a.weight", "a.lora_a", "a.lora_b", "b.weight"]
    every = TrainableParams(frozen=("b.*",))
    assert [every.includes(name) for name in names] == [True, True, True, False]
    adapters = TrainableParams(only=ADAPTERS, frozen=("*.lora_b",))
    assert [adapters.includes(name) for name in names] == [False, True, False, False]
    model = copy.deepcopy(random_decoder(VARIANTS["tied"]))
    TrainableParams(frozen=("layers.0.*", "norm.*")).freeze_rest(model)
    assert {n for n, p in model.named_parameters() if p.requires_grad} == {
        n for n, _ in model.named_parameters() if not n.startswith(("layers.0.", "norm."))
    }


class Samples(list[dict[str, Any]]):
    num_samples = 1


# of preferences the other columns hold no tokens
@pytest.mark.parametrize("labels", [[259, -100], [[259, 0, 261, 261], [-100, 261, 0, -100]]])
def test_special_tokens_of_padded_rows_need_a_trained_embedding(labels: list[Any]) -> None:
    model = random_decoder(VARIANTS["tied"])
    model.tok_embeddings.weight.detach()[260:] = 0.0
    tokens, length = torch.tensor([5, 259, 261]), torch.tensor(2)
    samples = Samples([{"tokens": tokens, "length": length, "labels": torch.tensor(labels)}])
    with fake_group(rank=0, world_size=1):
        check_special_rows(model, samples=samples, special_tokens={"<a>": 259, "<b>": 261})
        samples[0]["length"] += 1
        with pytest.raises(ConfigError, match=r"train_embeddings.*<b>"):
            check_special_rows(model, samples=samples, special_tokens={"<a>": 259, "<b>": 261})
