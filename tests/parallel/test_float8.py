"""Float8, emulated: what is computed, what is converted, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from tests.distributed import jobs as training_jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.models.decoder import Decoder
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.float8 import apply_float8
from torchtitan.parallel.settings import Float8Config

# a head that float8 could take
TINY = replace(MODELS["llama3"].flavors["tiny"], vocab_size=272)
E4M3_MAX = 448.0


def built(settings: Float8Config | None = None, *, tied: bool = False) -> Decoder:
    with torch.device("meta"):
        model: Decoder = MODELS["llama3"].build(replace(TINY, tie_embeddings=tied))
        if settings is not None:
            apply_float8(model, settings=settings)
    model.to_empty(device="cpu")
    initialize(model, seed=0)
    assert model.output is not None
    model.output.loss = build_loss(None)
    return model.bfloat16()


def rounded(x: Tensor) -> Tensor:
    """To float8 by the largest number, and back, in float64."""
    scale = E4M3_MAX / x.double().abs().max()
    return (x.double() * scale).to(torch.float8_e4m3fn).double() / scale


@pytest.mark.parametrize("emulate", [True, False])  # torch's product has a kernel for CPUs too
def test_a_layer_multiplies_what_is_rounded_to_float8(emulate: bool) -> None:
    pytest.importorskip("torchao")
    layer = built(Float8Config(emulate=emulate)).layers["0"].feed_forward.w1
    x = torch.randn(16, TINY.dim, generator=torch.Generator().manual_seed(0)).bfloat16()
    exact = x.double() @ layer.weight.double().T
    expected = rounded(x) @ rounded(layer.weight).T
    found = layer(x).double()
    # both roundings to bfloat16 and to scales of another width are far below float8's own
    assert (found - expected).norm() < 0.01 * expected.norm()
    assert (exact - expected).norm() > 0.02 * expected.norm()


@pytest.mark.parametrize("emulate", [True, False])
@pytest.mark.parametrize("recipe", [None, "rowwise", "rowwise_with_gw_hp"])
def test_gradients_are_those_of_bfloat16_to_the_rounding(recipe: str | None, emulate: bool) -> None:
    pytest.importorskip("torchao")
    settings = Float8Config(emulate=emulate, recipe_name=recipe)  # type: ignore[arg-type]
    tokens = torch.randint(0, 263, (2, 16), generator=torch.Generator().manual_seed(0))
    grads = []
    for model in (built(), built(settings)):
        model(tokens, labels=tokens.roll(-1)).backward()
        grads.append({name: p.grad for name, p in model.named_parameters()})
    plain, quantized = grads
    assert plain.keys() == quantized.keys()
    for name, grad in plain.items():
        assert grad is not None
        gap = (quantized[name].double() - grad.double()).norm() / grad.double().norm()
        assert 1e-4 < gap < 0.15, f"{name}: {gap}"


LAYOUTS = {
    "fsdp2": ["--parallelism.data_parallel_shard_degree=2"],
    "tp2": ["--parallelism.tensor_parallel_degree=2"],
    "pp2": ["--parallelism.pipeline_parallel_degree=2"],
}


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_layouts_train_alike(ranks: RankPool, tmp_path: Path, recipe: str) -> None:
    """And their checkpoints' tensors have the names and shapes that bfloat16's have."""
    pytest.importorskip("torchao")
    precision = ["--training.mixed_precision_param=bfloat16", "--training.steps=4"]
    precision += ["--model.vocab_size=272", "--lr_scheduler.warmup_steps=2"]
    options = ["--model.converters=float8", "--quantize.linear.float8.emulate"]
    options += [f"--quantize.linear.float8.recipe_name={recipe}", *precision]
    results = {}
    jobs = {"plain": (precision, 1), "alone": (options, 1)}
    jobs |= {name: ([*options, *layout], 2) for name, layout in LAYOUTS.items()}
    for name, (extra, world) in jobs.items():
        job = [*training_jobs.write_job(tmp_path, name=name), *extra]
        results[name] = ranks.run(training_jobs.train, job, world=world)
    losses = {name: [row["loss"] for row in found[0].rows] for name, found in results.items()}
    shapes = {
        name: {key: tensor.shape for result in found for key, tensor in result.final.items()}
        for name, found in results.items()
    }
    assert losses["alone"] == pytest.approx(losses["plain"], rel=1e-2)
    assert losses["alone"] != losses["plain"]
    for name in LAYOUTS:
        assert losses[name] == pytest.approx(losses["alone"], rel=2e-3), name
        assert shapes[name] == shapes["alone"] == shapes["plain"], name


def product(sharded: str, recipe: str) -> list[Tensor]:
    """Return the output and gradients of a float8 layer, whose shards differ in range by 1000."""
    generator = torch.Generator().manual_seed(0)
    shapes = (32, 64), (16, 64), (16, 32)
    weight, x, grad = (torch.randn(shape, generator=generator) for shape in shapes)
    weight[16:] *= 1000
    weight[:, 32:] *= 1000
    layer = nn.Sequential(nn.Linear(64, 32, bias=False, dtype=torch.bfloat16))
    layer[0].weight.data.copy_(weight)
    apply_float8(layer, settings=Float8Config(emulate=True, recipe_name=recipe))  # type: ignore[arg-type]
    if sharded:
        styles = {
            "columns": ColwiseParallel(output_layouts=Replicate()),
            "rows": RowwiseParallel(input_layouts=Replicate()),
        }
        parallelize_module(layer[0], init_device_mesh("cpu", (2,)), styles[sharded])
    x = x.bfloat16().requires_grad_()
    out = layer(x)
    out.backward(grad.bfloat16())
    gradient = layer[0].weight.grad
    assert gradient is not None
    assert x.grad is not None
    if isinstance(gradient, DTensor):
        gradient = gradient.full_tensor()
    return [each.detach().double() for each in (out, x.grad, gradient)]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("sharded", ["columns", "rows"])
def test_shards_have_the_scale_of_the_tensor(ranks: RankPool, sharded: str, recipe: str) -> None:
    """A scale per shard would round the smaller one otherwise, by about 3 %."""
    pytest.importorskip("torchao")
    expected = product("", recipe)
    for found in ranks.run(product, sharded, recipe, world=2):
        for one, other in zip(found, expected, strict=True):
            # by row and column: each has numbers of its own size, rounded to bfloat16 twice
            for dim in (0, 1):
                gap = (one - other).norm(dim=dim) / other.norm(dim=dim)
                assert gap.max() < 2**-6
