"""Context parallelism of a whole model: what is refused, and that nothing grows with S squared."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.distributed.rank_pool import RankPool
from tests.parallel.test_context_attention import Watch
from torchtitan.data.documents import build_text
from torchtitan.data.loader import Loader
from torchtitan.data.settings import DataLoaderConfig, TrainingConfig
from torchtitan.data.tokenizer import ByteTokenizer
from torchtitan.mesh.dims import build_mesh, resolve_dims
from torchtitan.mesh.settings import Balancer, ParallelismConfig
from torchtitan.models.families import MODELS
from torchtitan.models.init import initialize
from torchtitan.optim.loss import build_loss
from torchtitan.parallel.context.attention import Method, apply_context_parallel
from torchtitan.parallel.context.shard import build_shard

SEQ_LEN = 10_000


def largest_tensor(method: Method, balancer: Balancer, cache: str) -> int:
    """Elements of the largest tensor that a step makes, from the data set to the last gradient."""
    settings = ParallelismConfig(
        context_parallel_degree=2,
        context_parallel_rotate_method=method,
        context_parallel_load_balancer=balancer,
    )
    training = TrainingConfig(
        dataset="synthetic", seq_len=SEQ_LEN, attn_mask_type="block_causal", dataset_cache=cache
    )
    mesh = build_mesh(resolve_dims(settings, world_size=2), device_type="cpu")
    # so small a vocabulary that logits are no larger than activations
    model = MODELS["llama3"].build(replace(MODELS["llama3"].flavors["tiny"], vocab_size=258))
    initialize(model, seed=0)
    assert model.output is not None
    model.output.loss = build_loss(None)
    apply_context_parallel(model, mesh=mesh, parallelism=settings)
    with Watch() as watch:
        loader = Loader(
            build_text(training, tokenizer=ByteTokenizer(), seed=0),
            local_batch_size=1,
            accumulation=1,
            dp_rank=0,
            dp_degree=1,
            settings=DataLoaderConfig(),
        )
        part = build_shard(settings, training=training, mesh=mesh).take(next(loader)[0])
        model(part.tokens, part.positions, part.documents, part.labels).backward()
    assert part.documents is not None
    assert len(part.documents.lengths[0]) > 10
    assert all(p.grad is not None for p in model.parameters())
    return watch.largest


@pytest.mark.promise("no-square")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "balancer"),
    [("allgather", "headtail"), ("ring", "balanced"), ("ulysses", "headtail")],
)
def test_no_tensor_of_a_step_grows_with_the_square(
    method: Method, balancer: Balancer, ranks: RankPool, tmp_path: Path
) -> None:
    """Attention across documents is in tests/parallel/test_context_attention.py."""
    for largest in ranks.run(largest_tensor, method, balancer, str(tmp_path), world=2):
        assert 0 < largest < SEQ_LEN**2 / 64
