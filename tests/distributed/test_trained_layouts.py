"""A part of the model is trained, in every layout the same: some parameters, or adapters.

float32, the model of eight layers. Frozen are, among others, all of a pipeline's first stage, or a
tied embedding that lies on two stages.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.distributed import jobs
from tests.distributed.rank_pool import RankPool
from tests.distributed.test_layouts import assert_same_training
from tests.distributed.test_parts import resized
from torchtitan.checkpoint.state import optimizer_tensors
from torchtitan.lora import tensor as adapter_tensor
from torchtitan.trainer import Trainer

TINY8 = jobs.TINY.replace('"tiny"', '"tiny8"')
TIED = {"tie_embeddings": True}
TP2, PP2, CP2 = (
    f"--parallelism.{kind}_parallel_degree=2" for kind in ("tensor", "pipeline", "context")
)
FOUR = "--training.local_batch_size=4"
FEW = ("tok_embeddings.*", *(f"layers.{i}.*" for i in range(6)), "*.wk.weight", "norm.weight")
EMBEDDING = ("tok_*", "layers.*.feed_forward.w1.*")


def frozen(patterns: tuple[str, ...]) -> str:
    return f"--optimizer.frozen_params={list(patterns)}".replace("'", '"')


LORA = ("--lora.rank=4", "--lora.alpha=8.0", "--optimizer.lr=0.02")
PARTS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "few": ({}, (frozen(FEW),)),
    "all but a tied embedding": (TIED, (frozen(EMBEDDING),)),
    "adapters": ({}, (*LORA, '--optimizer.frozen_params=["layers.3.*.wo.lora_b"]')),
}
LAYOUTS = {
    ("few", "pp 2"): (2, (PP2, FOUR)),
    ("few", "pp 2, backward in two halves"): (
        2,
        (PP2, FOUR, "--parallelism.pipeline_parallel_schedule=ZBVZeroBubble"),
    ),
    ("few", "fsdp 2, tp 2, recomputed"): (4, (TP2, "--activation_checkpoint.mode=full")),
    ("all but a tied embedding", "pp 2"): (2, (PP2, FOUR)),
    ("adapters", "fsdp 2, pp 2"): (4, (PP2, FOUR)),
    ("adapters", "tp 2"): (2, (TP2,)),
    ("adapters", "fsdp 2, tp 2, stream copied, recomputed"): (
        4,
        (
            TP2,
            "--parallelism.enable_sequence_parallel=false",
            "--activation_checkpoint.mode=selective",
            "--activation_checkpoint.selective_ac_option=op",
        ),
    ),
    ("adapters", "cp 2"): (2, (CP2,)),
    ("adapters", "tp 2, compiled"): (2, (TP2, "--compile.enable", "--compile.backend=aot_eager")),
}
References = Callable[[str], tuple[jobs.Result, set[str]]]


def train(job: list[str]) -> tuple[jobs.Result, set[str]]:
    """Train; return what the job leaves, and the names of this rank's optimizer state."""
    run = jobs.start(job)
    initial = {name: jobs.full(p) for name, p in run.model.named_parameters()}
    trainer = Trainer(run)
    trainer.train()
    trainer.close()
    final = {name: jobs.full(p) for name, p in run.model.named_parameters()}
    names = {name.rpartition(".")[0] for name in optimizer_tensors(run.model, run.optimizer)}
    for name, p in run.model.named_parameters():
        assert (name in names) == p.requires_grad, name
        assert p.grad is None or p.requires_grad, name
    folder = next(a.partition("=")[2] for a in job if a.startswith("--job.dump_folder"))
    return jobs.Result(jobs.read_rows(folder), initial, final, ""), names


def job_of(part: str, folder: Path, cache: Path, *options: str) -> list[str]:
    job = jobs.write_job(folder, TINY8, cache=cache)
    return [*job, "--training.steps=3", *PARTS[part][1], *options]


@pytest.fixture(scope="module")
def on_one_device(
    ranks: RankPool, tmp_path_factory: pytest.TempPathFactory, cache: Path
) -> References:
    """Return the reference, trained once."""
    found: dict[str, tuple[jobs.Result, set[str]]] = {}

    def reference(part: str) -> tuple[jobs.Result, set[str]]:
        if part not in found:
            job = job_of(part, tmp_path_factory.mktemp("one"), cache)
            sizes = PARTS[part][0]
            [found[part]] = ranks.run(resized, train, sizes, job, "tiny8", world=1)
        return found[part]

    return reference


@pytest.mark.parametrize("part", PARTS)
def test_what_is_frozen_stays_and_all_else_moves(part: str, on_one_device: References) -> None:
    result, trained = on_one_device(part)
    for name, weights in result.final.items():
        assert torch.equal(weights, result.initial[name]) != (name in trained), name
    few = {"few": 2 * 8 + 1, "all but a tied embedding": 8 * 8 + 1, "adapters": 8 * 14 - 1}
    assert len(trained) == few[part]


@pytest.mark.parametrize(("part", "layout"), LAYOUTS)
def test_the_same_model(
    part: str,
    layout: str,
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: References,
) -> None:
    world, options = LAYOUTS[part, layout]
    job = job_of(part, tmp_path, cache, *options)
    results = ranks.run(resized, train, PARTS[part][0], job, "tiny8", world=world)
    reference, trained = on_one_device(part)
    assert set().union(*(names for _, names in results)) == trained
    final = {name: t for result, _ in results for name, t in result.final.items()}
    initial = {name: t for result, _ in results for name, t in result.initial.items()}
    assert final.keys() == reference.final.keys()
    for name, weights in initial.items():
        assert torch.equal(weights, reference.initial[name]), name
    assert_same_training(jobs.Result(results[0][0].rows, initial, final, ""), reference)


def train_with_copies_that_keep_their_own_ranks_gradient(job: list[str]) -> jobs.Result:
    """Plant the bug that the sum over ranks of a copied adapter's gradient is left out."""
    correct = adapter_tensor._local

    def local(tensor: Any) -> Tensor:
        is_copied_adapter = tensor.ndim == 2 and tensor.placements[0].is_replicate()
        return tensor.to_local() if is_copied_adapter else correct(tensor)

    adapter_tensor._local = local
    try:
        return jobs.train(job)
    finally:
        adapter_tensor._local = correct


def test_a_planted_bug_is_seen(
    ranks: RankPool,
    tmp_path: Path,
    cache: Path,
    on_one_device: References,
) -> None:
    job = job_of("adapters", tmp_path, cache, TP2)
    result = ranks.run(train_with_copies_that_keep_their_own_ranks_gradient, job, world=2)[0]
    norms = [row["grad_norm"] for row in result.rows]
    correct = [row["grad_norm"] for row in on_one_device("adapters")[0].rows]
    assert norms != pytest.approx(correct, rel=1e-3)
