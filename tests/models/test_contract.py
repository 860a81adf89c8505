"""What a family brings is compared with the contract, counted, and refused where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.own_family import (
    in_models,
    load_family,
    write_family,
    write_layers_without_positions,
)
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.models.init import initialize
from torchtitan.models.interface import TiedOutput, count
from torchtitan.models.rope import build_rope
from torchtitan.models.spec import check_contract

ROTATION: Any = {"head_dim": 4, "theta": 10_000.0, "scaling": None}
JOB = ["--model.name=parallel", "--model.flavor=tiny", "--training.seq_len=32"]


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Any:
    return load_family(write_family(tmp_path_factory.mktemp("family")))


@pytest.fixture(autouse=True)
def _registered(family: Any) -> Iterator[None]:
    with in_models(family.SPEC):
        yield


def test_a_family_of_its_own_is_counted_as_it_is(family: Any) -> None:
    model = family.SPEC.build(family.SIZES)
    found = count(family.SPEC.build_meta(family.SIZES))
    assert found.num_parameters == sum(p.numel() for p in model.parameters())
    initialize(model, seed=0)
    tokens = torch.zeros(2, 48, dtype=torch.int64)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(tokens, torch.arange(48)).sum().backward()
    assert counter.get_total_flops() == tokens.numel() * found.flops_per_token(48)
    layout = find_layout(load_config(JOB), world_size=1)
    assert layout.counts == found


def test_layers_without_positions_of_the_page(tmp_path: Path) -> None:
    """Without RoPE elsewhere nothing depends on positions; compiled and with a cache alike."""
    module = load_family(write_layers_without_positions(tmp_path))
    config = module.SPEC.flavors["tiny"]
    model = module.SPEC.build(config)
    initialize(model, seed=0)
    assert [layer.attention.window for layer in model.layers.values()] == [16, None] * 4
    tokens, positions = torch.arange(80).reshape(2, 40) % 64, torch.arange(40)
    logits = model(tokens, positions)
    assert not torch.allclose(model(tokens, 3 * positions), logits)
    compiled = torch.compile(module.NopeBlock(config), backend="aot_eager")
    x, turn = torch.randn(2, 8, config.dim), build_rope(torch.arange(8), **ROTATION)
    torch.testing.assert_close(compiled(x, turn, None), compiled._orig_mod(x, turn, None))
    model.layers.update({name: module.NopeBlock(config) for name in model.layers})
    initialize(model, seed=0)
    assert torch.equal(model(tokens, 3 * positions), model(tokens, positions))
    with in_models(module.SPEC):
        split = ["--parallelism.tensor_parallel_degree=2", "--model.name=nope", "--model.window=8"]
        assert find_layout(load_config([*JOB[1:], *split]), world_size=2).architecture.window == 8


def with_buffer(model: Any) -> None:
    model.register_buffer("mask", torch.empty(2))


def with_two_names(model: Any) -> None:
    model.output.weight = model.tok_embeddings.weight


def with_a_layer_less(model: Any) -> None:
    del model.layers["1"]


def with_a_tied_head(model: Any) -> None:
    model.output = TiedOutput()


def without_a_rule(model: Any) -> None:
    model.initial = lambda name: None


@pytest.mark.parametrize(
    ("change", "parts"),
    [
        (with_buffer, ["mask"]),
        (with_two_names, ["tok_embeddings.weight", "output.weight"]),
        (with_a_layer_less, ["layers", "'0'"]),
        (with_a_tied_head, ["tie_embeddings"]),
        (without_a_rule, ["tok_embeddings.weight"]),
    ],
)
def test_what_breaks_the_contract_is_named(
    change: Callable[[Any], None], parts: list[str], family: Any
) -> None:
    model = family.SPEC.build_meta(family.SIZES)
    check_contract(model, spec=family.SPEC)
    change(model)
    with pytest.raises(AssertionError) as error:
        check_contract(model, spec=family.SPEC)
    assert all(part in str(error.value) for part in parts), error.value
