"""RMSNorm as on a GPU: one operator, with its own rules for autograd and DTensor."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._decomp import decomposition_table

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.optim.loss import build_loss

aten = torch.ops.aten
OPERATORS = (aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default)


@contextmanager
def fused() -> Iterator[set[str]]:
    """Give a CPU the operators of a GPU, for which dispatch then asks; yield those that ran."""
    called: set[str] = set()

    def kernel(operator: torch._ops.OpOverload, *args: object) -> object:
        called.add(operator.name())
        return decomposition_table[operator](*args)

    with torch.library._scoped_library("aten", "IMPL") as library:
        for operator in OPERATORS:
            library.impl(operator, partial(kernel, operator), "CPU")
        yield called


def learned(family: str) -> list[Tensor]:
    """Return the loss and all gradients of a small model."""
    spec = MODELS[family]
    model = spec.build(spec.flavors["tiny8"])
    initialize(model, seed=0)
    model.output.loss = build_loss(None)
    tokens = torch.arange(64).view(2, 32)
    loss = model(tokens, labels=tokens.roll(-1))
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("family", ["llama3", "qwen3", "deepseek_v3"])
def test_a_model_learns_the_same(family: str) -> None:
    expected = learned(family)
    with fused() as called:
        found = learned(family)
    assert called == {operator.name() for operator in OPERATORS}
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def train(job: list[str]) -> list[tuple[float, float]]:
    return [(row["loss"], row["grad_norm"]) for row in jobs.train(job).rows]


def train_fused(job: list[str]) -> tuple[list[tuple[float, float]], set[str]]:
    with fused() as called:
        return train(job), called


@pytest.mark.slow
def test_tensor_parallel_norms_are_sharded(ranks: RankPool, tmp_path: Path) -> None:
    """By the operator's own rules."""
    short = ("--model.flavor=tiny8", "--training.steps=2")
    [expected] = ranks.run(train, [*jobs.write_job(tmp_path), *short], world=1)
    job = [*jobs.write_job(tmp_path, name="tp"), *short, "--parallelism.tensor_parallel_degree=2"]
    for found, called in ranks.run(train_fused, job, world=2):
        assert called == {operator.name() for operator in OPERATORS}
        assert found == [pytest.approx(row, rel=1e-5) for row in expected]
