"""What a family brings is compared with the contract, counted, and refused where it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from tests.models.own_family import (
    in_models,
    load_family,
    write_family,
    write_layers_without_positions,
)
from tests.naming import naming
from torchtitan.base.errors import ConfigError
from torchtitan.job import load_config
from torchtitan.layout import find_layout
from torchtitan.models import llama3
from torchtitan.models.decoder import Block, Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.init import Constant, initialize
from torchtitan.models.interface import Counts, TiedOutput, count
from torchtitan.models.rope import build_rope
from torchtitan.models.spec import NO_HF_FILES, HFFormat, ModelSpec, check_contract
from torchtitan.parallel.tensor import find_unplanned

ROTATION: Any = {"head_dim": 4, "theta": 10_000.0, "scaling": None}
JOB = ["--model.name=parallel", "--model.flavor=tiny", "--training.seq_len=32"]
LLAMA3 = MODELS["llama3"]


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


def test_a_decoder_with_another_feed_forward_is_counted_as_it_is() -> None:
    config = LLAMA3.flavors["tiny"]
    whole = count(LLAMA3.build_meta(config))
    without = config.num_layers * config.dim * config.hidden_dim
    found = count(without_w3().build_meta(config))
    assert found == replace(
        whole,
        num_parameters=whole.num_parameters - without,
        num_multiplied=whole.num_multiplied - without,
        multiplied_by_layer=tuple(
            n - config.dim * config.hidden_dim for n in whole.multiplied_by_layer
        ),
    )


def test_what_each_token_multiplies_may_be_fewer_than_all() -> None:
    """6 N by hand."""
    found = Counts(num_parameters=100, num_multiplied=10, num_head=2, attention_width=3)
    assert found.flops_per_token(7) == 6 * 10 + 12 * 3 * 7


@pytest.mark.parametrize(
    ("options", "world_size", "parts"),
    [
        (
            ["--parallelism.tensor_parallel_degree=2"],
            2,
            ["tensor_parallel_degree: must be 1, got 2", "tensor_plan", "layers.0.attention.wk"],
        ),
        (
            ["--parallelism.pipeline_parallel_degree=2"],
            2,
            ["pipeline_parallel_degree: must be 1 for parallel", "stages = False"],
        ),
        (
            ["--checkpoint.enable", "--checkpoint.last_save_in_hf"],
            1,
            ["[checkpoint] last_save_in_hf", "parallel"],
        ),
        (
            [
                "--checkpoint.enable",
                "--checkpoint.initial_load_in_hf",
                "--checkpoint.initial_load_path=x",
            ],
            1,
            ["[checkpoint] initial_load_in_hf", "parallel"],
        ),
    ],
)
def test_what_its_spec_lacks_is_refused(
    options: list[str], world_size: int, parts: list[str]
) -> None:
    with pytest.raises(ConfigError) as error:
        find_layout(load_config([*JOB, *options]), world_size=world_size)
    assert all(part in str(error.value) for part in parts), error.value


def with_buffer(model: Any) -> None:
    model.register_buffer("mask", torch.empty(2))


def with_two_names(model: Any) -> None:
    model.output.weight = model.tok_embeddings.weight


def with_a_layer_less(model: Any) -> None:
    del model.layers["1"]


def with_an_own_attention(model: Any) -> None:
    model.layers["1"].attention = nn.Identity()


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


def test_attention_of_its_own_goes_with_no_context_parallelism(family: Any) -> None:
    def build(config: Any) -> Any:
        model = family.SPEC.build(config)
        with_an_own_attention(model)
        return model

    job = load_config([*JOB, "--parallelism.context_parallel_degree=2"])
    find_layout(job, world_size=2)
    with (
        in_models(replace(family.SPEC, name="mixer", build=build)),
        pytest.raises(ConfigError, match=naming("context_parallel_degree", "layers.1")),
    ):
        find_layout(
            load_config([*JOB, "--parallelism.context_parallel_degree=2", "--model.name=mixer"]),
            world_size=2,
        )


class WithoutW3(Decoder):
    """Another feed-forward under Llama's names."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for block in self.layers.values():
            assert isinstance(block, Block)
            del block.feed_forward.w3

    initial = LLAMA3.build_meta(LLAMA3.flavors["tiny"]).__class__.initial


def without_w3(hf: HFFormat = LLAMA3.hf) -> ModelSpec:
    return replace(LLAMA3, name="without_w3", build=WithoutW3, hf=hf)


def test_an_export_that_would_lack_or_invent_a_parameter_is_refused_before_the_training() -> None:
    fewer = {ours: theirs for ours, theirs in LLAMA3.hf.names.items() if "w3" not in ours}
    unknown = {ours: theirs for ours, theirs in fewer.items() if ours != "layers.*.ffn_norm.weight"}
    job = ["--model.name=without_w3", "--model.flavor=tiny", "--model.tokenizer_path=byte"]
    config = load_config([*job, "--checkpoint.enable", "--checkpoint.last_save_in_hf"])
    for names, part in (
        (LLAMA3.hf.names, "layers.0.feed_forward.w3.weight"),
        (unknown, "layers.0.ffn_norm.weight"),
    ):
        spec = without_w3(replace(LLAMA3.hf, names=names))
        with in_models(spec), pytest.raises(ConfigError, match=naming("last_save_in_hf", part)):
            find_layout(config, world_size=1)
    with in_models(without_w3(replace(LLAMA3.hf, names=fewer))):
        find_layout(config, world_size=1)


class Gated(llama3.Llama3):
    """A block of it has a parameter beside its modules."""

    shape: tuple[int, ...] = (1,)

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        for block in self.layers.values():
            block.gate = nn.Parameter(torch.ones(self.shape))

    def initial(self, name: str) -> Any:
        return Constant(1.0) if name.endswith("gate") else super().initial(name)


class Scalar(Gated):
    shape = ()


def test_a_parameter_has_a_dimension() -> None:
    """One without would train on one rank, and could not be sharded on two."""
    for build, is_right in ((Gated, True), (Scalar, False)):
        spec = replace(LLAMA3, name="gated", build=build, hf=NO_HF_FILES)
        with nullcontext() if is_right else pytest.raises(AssertionError, match=r"layers\.0\.gate"):
            check_contract(spec.build_meta(LLAMA3.flavors["tiny"]), spec=spec)


def test_a_parameter_of_a_block_is_no_part_of_a_tensor_plan() -> None:
    plan = {**LLAMA3.tensor_plan, "layers.*": "norm"}
    spec = replace(LLAMA3, name="gated", build=Gated, hf=NO_HF_FILES, tensor_plan=plan)
    said = find_unplanned(spec.build_meta(LLAMA3.flavors["tiny"]), plan=spec.tensor_plan)
    assert said.startswith("layers.0 has parameters of its own")
