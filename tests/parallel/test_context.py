"""Context parallelism of a whole model: what is refused, and that nothing grows with S squared."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.distributed.rank_pool import RankPool
from tests.parallel.test_context_attention import METHODS, Watch
from torchtitan.assemble.layout import find_layout
from torchtitan.base.errors import ConfigError
from torchtitan.config.load import load_config
from torchtitan.config.schema import ParallelismConfig
from torchtitan.mesh.dims import build_mesh, resolve_dims
from torchtitan.models import MODELS, initialize
from torchtitan.models.attention import causal_attention
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.context import apply_context_parallel, build_shard
from torchtitan.parallel.context_attention import Method

SEQ_LEN = 4440


def arguments(method: str, *, cp: int, tp: int = 1) -> list[str]:
    return [
        # 4 query heads, 2 key/value heads; twice that, since tensor parallelism wants its part
        f"--model.flavor={'tiny' if tp == 1 else 'tiny8'}",
        f"--parallelism.context_parallel_rotate_method={method}",
        f"--parallelism.context_parallel_degree={cp}",
        f"--parallelism.tensor_parallel_degree={tp}",
        "--training.seq_len=48",
    ]


@pytest.mark.parametrize(
    ("cp", "tp", "rule"),
    [
        (3, 1, "4 query heads must be a multiple of 3 (context_parallel_degree 3 x"),
        (4, 1, "2 key/value heads must be a multiple of 4 (context_parallel_degree 4 x"),
        (4, 2, "4 key/value heads must be a multiple of 8 (context_parallel_degree 4 x tensor_pa"),
    ],
)
def test_ulysses_is_refused_without_the_heads(cp: int, tp: int, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        find_layout(load_config(arguments("ulysses", cp=cp, tp=tp)), world_size=cp * tp)
    assert rule in str(caught.value)
    assert 'write "ring" or "allgather"' in str(caught.value)


def test_the_other_methods_need_no_heads() -> None:
    for method in ("allgather", "ring", "alltoall"):
        find_layout(load_config(arguments(method, cp=4)), world_size=4)
    find_layout(load_config(arguments("ulysses", cp=2)), world_size=2)
    find_layout(load_config(arguments("ulysses", cp=1)), world_size=1)


def test_one_rank_keeps_the_model_as_it_is(ranks: RankPool) -> None:
    assert ranks.run(attention_of_one, world=1) == [True]


def attention_of_one() -> bool:
    settings = ParallelismConfig()
    mesh = build_mesh(resolve_dims(settings, world_size=1), device_type="cpu")
    model = MODELS["llama3"].build(MODELS["llama3"].flavors["tiny"])
    apply_context_parallel(model, mesh=mesh, parallelism=settings)
    return all(block.attention.attend is causal_attention for block in model.layers.values())


def largest_tensor(method: Method) -> int:
    """Elements of the largest tensor that a step makes, from the tokens to the last gradient."""
    settings = ParallelismConfig(context_parallel_degree=2, context_parallel_rotate_method=method)
    mesh = build_mesh(resolve_dims(settings, world_size=2), device_type="cpu")
    # so small a vocabulary that logits are no larger than activations
    model = MODELS["llama3"].build(replace(MODELS["llama3"].flavors["tiny"], vocab_size=64))
    initialize(model, seed=0)
    assert model.output is not None
    model.output.loss = build_loss(None)
    apply_context_parallel(model, mesh=mesh, parallelism=settings)
    tokens = torch.arange(SEQ_LEN)[None] % 64
    with Watch() as watch:
        part = build_shard(settings, mesh=mesh).take({"tokens": tokens, "labels": tokens})
        model(part.tokens, part.positions, labels_BS=part.labels).backward()
    assert all(p.grad is not None for p in model.parameters())
    return watch.largest


@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_of_a_step_grows_with_the_square(method: Method, ranks: RankPool) -> None:
    for largest in ranks.run(largest_tensor, method, world=2):
        assert 0 < largest < SEQ_LEN**2 / 64
