"""Tensor parallelism: every gradient is that of plain PyTorch in float64.

What it trains together with other features is in test_matrix.py. float32, samples with a random
number of labels masked.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.conftest import OneDevice
from tests.distributed.rank_pool import RankPool
from tests.jobs import HSDP, TINY
from torchtitan.data.documents import build_text
from torchtitan.data.tokenizer import build_tokenizer
from torchtitan.job import load_config
from torchtitan.models.families import find_model
from torchtitan.models.init import initialize
from torchtitan.optim.loss import count_valid

pytestmark = pytest.mark.slow

SIZES = (
    *("--model.dim=16", "--model.num_heads=8", "--model.num_kv_heads=4"),
    *("--model.hidden_dim=40", "--model.vocab_size=268"),
)
TIED = (*SIZES, "--model.tie_embeddings=true")
EVEN = ("--model.flavor=tiny8", "--model.num_layers=2")
QWEN3 = (*SIZES, "--model.head_dim=6")
TP2 = "--parallelism.tensor_parallel_degree=2"
EP2 = "--parallelism.expert_parallel_degree=2"
TP4 = "--parallelism.tensor_parallel_degree=4"
COPIED_STREAM = "--parallelism.enable_sequence_parallel=false"
WHOLE_LOGITS = "--parallelism.disable_loss_parallel=true"
WHOLE = "--training.local_batch_size=8"

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "tp 2": (2, (TP2, WHOLE)),
    "tp 4": (4, (TP4, WHOLE)),
    "tp 4, stream copied, logits gathered": (4, (TP4, COPIED_STREAM, WHOLE_LOGITS, WHOLE)),
    "tp 2, accumulating": (2, (TP2, "--training.local_batch_size=4")),
    "hsdp 2x2, tp 2": (8, (TP2, *HSDP)),
    "ep 2": (2, (EP2,)),
    "ep 2, fsdp 2": (4, (EP2,)),
}


def gradients(job: list[str]) -> dict[str, Tensor]:
    """Return what the first step leaves in every parameter before clipping."""
    run = jobs.start(job)
    batches = [run.sequence_shard.take(samples) for samples in next(run.loader)]
    num_valid = torch.stack([count_valid(batch.labels) for batch in batches]).sum()
    dist.all_reduce(num_valid)
    divisor = num_valid // (run.mesh.dims.pp * run.mesh.dims.tp)
    run.execution.forward_backward(batches, divisor=divisor)
    run.loader.close()
    found = {name: p.grad for name, p in run.model.named_parameters()}
    return {name: jobs.full(grad) for name, grad in found.items() if grad is not None}


def float64_gradients(job: list[str]) -> dict[str, Tensor]:
    """Return the same by plain PyTorch."""
    config = load_config(job)
    dataset = build_text(config.training, tokenizer=build_tokenizer("byte"), seed=0)
    spec, sizes = find_model(config.model)
    model = spec.build(sizes)
    initialize(model, seed=0)
    model.double()
    batch = [dataset[k] for k in range(8)]
    tokens = torch.stack([sample["tokens"] for sample in batch])
    labels = torch.stack([sample["labels"] for sample in batch])
    F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


GRADIENTS = [
    ("tp 2", "llama3", TIED),
    ("tp 2", "qwen2", SIZES),
    ("tp 4", "qwen3", QWEN3),
    ("tp 4, stream copied, logits gathered", "llama3", SIZES),
    ("tp 2, accumulating", "qwen3", QWEN3),
    ("hsdp 2x2, tp 2", "llama3", SIZES),
    # for the bugs of test_mutants.py
    pytest.param("tp 2", "qwen3_moe", EVEN, marks=pytest.mark.long),
    pytest.param("ep 2", "qwen3_moe", EVEN, marks=pytest.mark.long),
    pytest.param("ep 2, fsdp 2", "qwen3_moe", EVEN, marks=pytest.mark.long),
    pytest.param("tp 2", "deepseek_v3", EVEN, marks=pytest.mark.long),
]


@pytest.mark.promise("hsdp", "tp", "ep")
@pytest.mark.slow(gate=["tp 2-llama3-sizes0"])
@pytest.mark.parametrize(("layout", "family", "sizes"), GRADIENTS)
def test_every_parameters_gradient(
    layout: str,
    family: str,
    sizes: tuple[str, ...],
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: OneDevice,
) -> None:
    world, overrides = LAYOUTS[layout]
    name = f"--model.name={family}"
    expected = on_one_device(float64_gradients, name, *sizes, toml=TINY)
    job = [*jobs.write_job(tmp_path, cache=cache), name, *sizes, *overrides]
    results = ranks.run(gradients, job, world=world)
    for result in results:
        assert result.keys() == expected.keys()
        for name, grad in result.items():
            error = (grad - expected[name]).norm() / expected[name].norm()
            assert error < 2e-6, f"{name} is off by {error}"
